# What the processes prove to each other: made afresh at each start.
JAXSCALE_SECRET=$(od -vAn -N32 -tx1 /dev/urandom | tr -d ' \n')
export JAXSCALE_SECRET
