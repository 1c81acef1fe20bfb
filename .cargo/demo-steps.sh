# What both demos share; they source it.

started=$(date +%s)
step() { printf '\n== %3d s · %s\n' "$(($(date +%s) - started))" "$*"; }
fail() { printf 'demo: error: %s\n' "$*" >&2; exit 1; }

# Trains in the background, and kills that after its first save: `train_and_kill RUN LOG COMMAND…`.
train_and_kill() {
    saved=$1/step-[0-9][0-9][0-9][0-9][0-9][0-9]
    log=$2
    shift 2
    "$@" >"$log" 2>&1 &
    training=$!
    trap 'kill -9 "$training" 2>/dev/null || true' EXIT
    trap 'exit 130' INT TERM
    # shellcheck disable=SC2086  # a pattern
    until ls -d $saved >/dev/null 2>&1; do
        kill -0 "$training" 2>/dev/null || { cat "$log"; fail 'training ended before its first save'; }
        sleep 0.2
    done
    kill -9 "$training" 2>/dev/null || fail 'training ended before it could be killed: let it run longer, or save earlier'
    wait "$training" 2>/dev/null || true
    trap - EXIT
    # shellcheck disable=SC2086
    echo "killed; saved so far:" $saved
}
