#!/bin/sh
# Run this app on a superlink and supernodes, all on this machine, and stop them again. A node is a process, as on a
# machine of its own. The logs are kept if the run fails.
#
#     sh examples/flower/deployment.sh [NODES] [RUN_CONFIG]
set -eu
app=$(cd "$(dirname "$0")" && pwd)
nodes=${1:-4}
settings=${2:-num-rounds=4 warm-up=false policies=\"fl-r2sp:groups=2\"}
port=${PORT:-8000}  # of the superlink; a node serves its own apps on one of the ports after it
case $nodes in '' | *[!0-9]* | 0 | 1) echo "NODES must be at least 2; got '$nodes'." >&2; exit 2 ;; esac
command -v flower-superlink > /dev/null || { echo "Flower is missing: pip install 'paceline[flower]'." >&2; exit 2; }

folder=$(mktemp -d)
processes=
stop() {
  status=$?
  for process in $processes; do kill "$process" 2> /dev/null || true; done
  wait
  case $status in
    0 | 130 | 143) rm -r "$folder" ;;
    *) echo "The run has failed. The logs of the superlink and of the nodes are kept in $folder." >&2 ;;
  esac
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

printf '[superlink]\ndefault = "deployment"\n\n[superlink.deployment]\naddress = "127.0.0.1:%s"\ninsecure = true\n' \
  "$port" > "$folder/config.toml"
flower-superlink --insecure --port "$port" > "$folder/superlink.log" 2>&1 &
processes="$processes $!"
link=$!
echo "Starting a superlink and $nodes supernodes. Until the end, their logs are in $folder."
until python3 -c "import socket; socket.create_connection(('127.0.0.1', $port), 1)" 2> /dev/null; do
  kill -0 "$link" 2> /dev/null || { cat "$folder/superlink.log" >&2; exit 1; }
  sleep 0.5
done
node=0
while [ "$node" -lt "$nodes" ]; do
  # Each node keeps the app in a folder of its own, as it does on a machine of its own.
  FLWR_HOME="$folder/node$node" flower-supernode --insecure --superlink "127.0.0.1:$port" \
    --port $((port + 1 + node)) --node-config "partition-id=$node num-partitions=$nodes" \
    > "$folder/node$node.log" 2>&1 &
  processes="$processes $!"
  node=$((node + 1))
done
FLWR_HOME="$folder" flwr run "$app" deployment --stream --run-config "$settings"
