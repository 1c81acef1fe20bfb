#!/bin/sh
# The lines of `run.sh` as a table in Markdown: for each policy and number of slots the per cent of right answers, mean over seeds
# (lowest-highest), with (a) adapters trained with the dense cache and (b) adapters trained with the policy in the loop.
set -eu
export LC_ALL=C
awk -F '\t' '
NR == 1 { next }
{
    row = $1 FS $2
    if (!(row in known)) { known[row] = 1; rows[++count] = row }
    for (task = 5; task <= NF; task++) {
        at = row FS $4 FS task
        x = 100 * $task
        if (!(at in n)) low[at] = high[at] = x
        n[at]++
        sum[at] += x
        if (x < low[at]) low[at] = x
        if (x > high[at]) high[at] = x
    }
}
function cell(at) {
    return at in n ? sprintf("%.1f (%.1f-%.1f)", sum[at] / n[at], low[at], high[at]) : "-"
}
END {
    print "| policy | slots | needle (a) | needle (b) | keys (a) | keys (b) | variables (a) |"
    print "|---|---|---|---|---|---|---|"
    for (i = 1; i <= count; i++) {
        split(rows[i], name, FS)
        line = "| `" name[1] "` | " name[2] " |"
        for (task = 5; task <= 6; task++)
            line = line " " cell(rows[i] FS "dense" FS task) " | " cell(rows[i] FS "policy" FS task) " |"
        print line " " cell(rows[i] FS "dense" FS 7) " |"
    }
}'
