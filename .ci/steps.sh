# Sourced by .ci/run and .ci/nightly, in the root of a checkout: steps with limits, run in the order of their definition. Output
# of each step goes to logs/ci/STEP.log; here comes its end. The run stops at the first step that fails, and after BUDGET minutes.

export LOGS=logs/ci
mkdir -p "$LOGS"

names=() limits=() num_lines=() commands=()
# step NAME MINUTES NUM_LINES COMMAND: NUM_LINES of its output are shown
step() {
    names+=("$1") limits+=("$2") num_lines+=("$3") commands+=("$4")
}

# packages PROGRAM=PACKAGE...: Debian packages of the programs that are missing
packages() {
    local missing=() sudo=() pair
    for pair in "$@"; do command -v "${pair%=*}" || missing+=("${pair#*=}"); done
    ((${#missing[@]})) || return 0
    [[ $(id -u) == 0 ]] || sudo=(sudo --non-interactive)
    "${sudo[@]}" apt-get update --quiet
    DEBIAN_FRONTEND=noninteractive "${sudo[@]}" apt-get install --quiet --yes --no-install-recommends "${missing[@]}"
}
export -f packages

# retried TARGET: a suite over real processes. A test that fails beside others runs once more with those that failed; run_step
# names it, since it is to be mended.
retried() {
    make "$1" && return
    make "$1" ARGS='--last-failed --last-failed-no-failures=none'
}
export -f retried

run_step() {
    local name=$1 limit=$((60 * $2)) lines=$3 command=$4 log=$LOGS/$1.log start=$SECONDS status=0
    local left=$((60 * BUDGET - SECONDS))
    if ((limit > left)); then limit=$((left > 0 ? left : 1)); fi
    printf '== %s\n' "$name"
    timeout --kill-after=30 "${limit}s" bash -euo pipefail -c "$command" >"$log" 2>&1 || status=$?
    if ((status != 0)); then
        tail -n 200 "$log"
        printf '== %s FAILED with status %d after %d s (log: %s)\n' "$name" "$status" "$((SECONDS - start))" "$log"
        exit 1
    fi
    tail -n "$lines" "$log"
    if grep -E '^(FAILED|ERROR) ' "$log"; then printf '== %s: these failed once\n' "$name"; fi
    printf '== %s passed in %d s of at most %d\n\n' "$name" "$((SECONDS - start))" "$limit"
}

run_steps() {
    local i
    for i in "${!names[@]}"; do run_step "${names[i]}" "${limits[i]}" "${num_lines[i]}" "${commands[i]}"; done
    printf '== passed in %d s\n' "$SECONDS"
}
