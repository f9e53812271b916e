#!/usr/bin/env bash
# Start Ray's head on this machine, by hand, with token authentication, and keep it until Ctrl-C:
#   launch/head.sh [FOLDER] [more options of grpo_dist.launch.node, e.g. --interface ib0 --gpus 8 --gcs-port 6379]
# FOLDER (default: ./cluster) gets cluster.json (addresses), ray_token (mode 0600) and the logs. Other machines join with
# launch/join.sh; runs are sent with `grpo-dist submit`, backend ray (cluster_configs/ray/existing.yaml).
set -eu

folder="${1:-cluster}"
[ "$#" -gt 0 ] && shift
mkdir -p "$folder"
folder="$(cd "$folder" && pwd)"
echo "token: $folder/ray_token    addresses: $folder/cluster.json    Ctrl-C ends the head and all that it started"
exec "${PYTHON:-python}" -m grpo_dist.launch.node --folder "$folder" --token "$folder/ray_token" \
  --name "$(hostname)" --role "${ROLE:-head}" --head "$@" -- sleep infinity
