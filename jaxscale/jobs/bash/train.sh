train() {  # OPTIONS of srun
  step "${srun[@]}" "$@" "${files[@]}" "${python[@]}" -m jaxscale.train \
    "${config[@]}" --workdir "$workdir"
}
