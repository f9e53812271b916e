#!/usr/bin/env bash
# The RayJob of a run, to read before it goes, or to send with kubectl alone:
#   launch/kubernetes.sh RECIPE CLUSTER_FILE [key=value …]                       prints it
#   launch/kubernetes.sh RECIPE CLUSTER_FILE [key=value …] | kubectl apply -f -  sends it
set -eu

if [ "$#" -lt 2 ]; then
  sed -n '2,4s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
recipe="$1" cluster="$2"
shift 2
exec grpo-dist submit "$recipe" --cluster "$cluster" --dry-run "$@"
