#!/usr/bin/env bash
# Several Ray nodes on this one machine, one per role, for trying out placement and `submit` without a cluster:
#   launch/local_cluster.sh [FOLDER] [ROLE…]          (default: ./cluster  learner rollout)
# The first role is the head's. Each node has its own ports and session; Ctrl-C ends them all. Then, elsewhere:
#   RAY_ADDRESS=… RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=FOLDER/ray_token grpo-dist train quickstart
set -eu

folder="${1:-cluster}"
[ "$#" -gt 0 ] && shift
[ "$#" -gt 0 ] || set -- learner rollout
mkdir -p "$folder/nodes"
folder="$(cd "$folder" && pwd)"
names=""
for number in $(seq "$#"); do names="$names${names:+,}node$((number - 1))"; done

python="${PYTHON:-python}"
number=0
for role in "$@"; do
  if [ "$number" -gt 0 ]; then
    "$python" -m grpo_dist.launch.node --folder "$folder/nodes" --token "$folder/ray_token" --name "node$number" \
      --role "$role" --cpus "${CPUS:-2}" > "$folder/node$number.out" 2>&1 &
  fi
  number=$((number + 1))
done
echo "logs: $folder/*.out and $folder/nodes; the head's address will be in $folder/nodes/cluster.json"
# The other nodes leave when the head has written that it ended.
exec "$python" -m grpo_dist.launch.node --folder "$folder/nodes" --token "$folder/ray_token" --name node0 --role "$1" \
  --cpus "${CPUS:-2}" --head --expect "$names" -- sleep infinity
