#!/usr/bin/env bash
# One image, three uses:
#   docker run grpo-dist node --head --role learner … -- COMMAND     a Ray node by role (grpo_dist.launch.node)
#   docker run grpo-dist train quickstart                            a verb of grpo-dist
#   docker run grpo-dist bash                                        anything else, as it is (KubeRay starts Ray this way)
set -eu

case "${1:-}" in
  node)
    shift
    exec python -m grpo_dist.launch.node "$@"
    ;;
  train | check | eval | score | submit | jobs | status | logs | stop | scale | report | replay | export | plan | doctor | recipes)
    exec grpo-dist "$@"
    ;;
  *)
    exec "$@"
    ;;
esac
