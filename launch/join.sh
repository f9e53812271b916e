#!/usr/bin/env bash
# Join this machine to a running head, by hand, as a node of one role:
#   launch/join.sh HOST:PORT ROLE TOKEN_FILE [more options of grpo_dist.launch.node, e.g. --interface ib0 --gpus 8]
# ROLE: learner | rollout | verifier. TOKEN_FILE: a copy (mode 0600) of the head's ray_token.
# The node leaves by itself when the head is gone for 30 s; Ctrl-C drains it and leaves.
set -eu

if [ "$#" -lt 3 ]; then
  sed -n '2,6s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
address="$1" role="$2" token="$3"
shift 3
folder="$(mktemp -d "${TMPDIR:-/tmp}/grpo-node.XXXXXX")"
exec "${PYTHON:-python}" -m grpo_dist.launch.node --folder "$folder" --token "$token" --name "$(hostname)-$$" \
  --role "$role" --head-address "$address" "$@"
