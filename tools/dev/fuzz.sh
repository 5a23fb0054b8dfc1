# ./dev fuzz: libFuzzer targets under AddressSanitizer and UndefinedBehaviorSanitizer.

help_fuzz() {
  cat <<'END'
Feeds broken input to everything that reads foreign bytes.

usage: ./dev fuzz [TARGET] [--seconds N]

  TARGET       a file of fuzz/ without _fuzz.cpp; all of them when left out
  --seconds N  how long each target runs (default 60)

New inputs are kept in build/fuzz/corpus/<target>; a crash leaves its input in build/fuzz/crashes.
END
}

fuzz_targets() {
  local file
  for file in fuzz/*_fuzz.cpp; do
    [[ -f $file ]] && basename "$file" _fuzz.cpp
  done
}

cmd_fuzz() {
  local seconds=60 targets=()
  while (($# > 0)); do
    case $1 in
      --seconds)
        [[ ${2:-} =~ ^[1-9][0-9]*$ ]] ||
          bad_usage fuzz "--seconds is '${2:-}'; expected a whole number from 1 on"
        seconds=$2
        shift
        ;;
      -*) bad_usage fuzz "unknown option '$1'" ;;
      *) targets+=("$1") ;;
    esac
    shift
  done
  local known target
  mapfile -t known < <(fuzz_targets)
  ((${#targets[@]} > 0)) || targets=("${known[@]}")
  ((${#targets[@]} > 0)) || fail "there is no fuzz target in fuzz/"
  for target in "${targets[@]}"; do
    [[ -f fuzz/${target}_fuzz.cpp ]] ||
      bad_usage fuzz "unknown target '$target'; expected one of: ${known[*]}"
  done

  ensure_packages
  build_preset asan "${targets[@]/%/_fuzz}"
  fuzz_all "$seconds" "${targets[@]}"
  summary
}

# As many targets at a time as there are processors; each runs on one.
fuzz_all() {
  local seconds=$1 target failed=()
  shift
  local -A processes
  for target in "$@"; do
    while (($(jobs -rp | wc -l) >= $(nproc))); do sleep 0.2; done
    step "Fuzzing $target for $seconds s"
    fuzz_one "$target" "$seconds" &
    processes[$target]=$!
  done
  for target in "$@"; do
    if wait "${processes[$target]}"; then
      did "$target: $(num_fuzzed_inputs "$target") inputs in $seconds s, no fault"
    else
      tail -n 60 "build/fuzz/$target.log" >&2
      failed+=("$target")
    fi
  done
  ((${#failed[@]} == 0)) ||
    fail "fuzz targets found faults: ${failed[*]}; their inputs lie in build/fuzz/crashes"
}

fuzz_one() {
  local target=$1 seconds=$2
  local found=build/fuzz/corpus/$target seeds=fuzz/corpus/$target
  mkdir -p "$found" build/fuzz/crashes
  local folders=("$found")
  [[ -d $seeds ]] && folders+=("$seeds")
  "build/asan/fuzz/${target}_fuzz" -max_total_time="$seconds" -timeout=25 -rss_limit_mb=4096 \
    -artifact_prefix=build/fuzz/crashes/ -print_final_stats=1 "${folders[@]}" \
    >"build/fuzz/$target.log" 2>&1
}

num_fuzzed_inputs() { awk '/number_of_executed_units/ { print $2 }' "build/fuzz/$1.log"; }
