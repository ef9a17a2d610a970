# The processes prove to each other that they have this secret, which is new at each start.
JAXSCALE_SECRET=$(od -vAn -N32 -tx1 /dev/urandom | tr -d ' \n')
export JAXSCALE_SECRET
