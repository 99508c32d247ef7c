#!/usr/bin/env bash
# One-node Ceph RGW on 127.0.0.1, objects in memory: a second S3 server for the benchmarks, whose
# writing is several times as fast as SeaweedFS's. It keeps no checksums.
#   apt-get install --no-install-recommends radosgw ceph-mon ceph-osd
#   scripts/rgw.sh start DIR [BYTES]     prints the endpoint's URL; the keys are AKID / SECRET
#   scripts/rgw.sh stop DIR              and removes DIR
set -euo pipefail
action=${1:?start or stop} dir=$(realpath -m "${2:?a folder for the state}")
store_bytes=${3:-$((8 << 30))}
export CEPH_ARGS="-c $dir/ceph.conf"

free_port() {
  "${PYTHON:-python3}" -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

wait_for() {
  for _ in $(seq 600); do
    if "$@" >/dev/null 2>&1; then return 0; fi
    sleep 0.05
  done
  echo "gave up waiting for: $*" >&2
  return 1
}

configure() {
  cat > "$dir/ceph.conf" <<CONF
[global]
fsid = $(cat /proc/sys/kernel/random/uuid)
mon initial members = a
mon host = v2:127.0.0.1:$(free_port)
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = none
auth service required = none
auth client required = none
ms mon client mode = crc
run dir = $dir
crash dir = $dir/crash
admin socket = $dir/\$name.asok
pid file = $dir/\$name.pid
log file = $dir/\$name.log
log to stderr = false
debug ms = 0
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pgp num = 8
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0

[mon]
mon data = $dir/mon.a
mon cluster log file = $dir/cluster.log
mon allow pool size one = true
mon warn on pool no redundancy = false
mon pg warn min per osd = 0
mon data avail crit = 1
mon data avail warn = 2
paxos propose interval = 0.05
auth allow insecure global id reclaim = false

[osd]
osd data = $dir/osd.0
osd objectstore = memstore
memstore device bytes = $store_bytes
osd max scrubs = 1

[client]
rgw frontends = beast endpoint=127.0.0.1:$(cat "$dir/port") tcp_nodelay=1
rgw enable usage log = false
rgw enable ops log = false
rgw gc obj min wait = 1
rgw gc processor period = 1
rgw gc processor max time = 5
rgw rados pool pg num min = 8
rgw thread pool size = 64
CONF
}

start() {
  mkdir -p "$dir/crash" "$dir/mon.a" "$dir/osd.0"
  free_port > "$dir/port"
  configure
  local fsid address osd_id
  fsid=$(awk '$1 == "fsid" {print $3}' "$dir/ceph.conf")
  address=$(awk '/^mon host/ {print $4}' "$dir/ceph.conf")
  monmaptool --create --clobber --addv a "[$address]" --fsid "$fsid" "$dir/monmap" >/dev/null
  ceph-mon -i a --mkfs --monmap "$dir/monmap"
  ceph-mon -i a
  osd_id=$(cat /proc/sys/kernel/random/uuid)
  ceph --connect-timeout 20 osd new "$osd_id" 0 >/dev/null
  ceph-osd -i 0 --mkfs --osd-uuid "$osd_id" 2>/dev/null
  ceph-osd -i 0 >/dev/null
  wait_for sh -c "ceph osd stat | grep -q '1 up'"
  # the user first: that makes the pools that the gateway looks for
  radosgw-admin user create --uid=bench --display-name=bench --access-key=AKID --secret-key=SECRET \
    >/dev/null 2>&1
  radosgw -n client.rgw
  wait_for curl -s -o /dev/null "http://127.0.0.1:$(cat "$dir/port")/"
  echo "http://127.0.0.1:$(cat "$dir/port")"
}

stop() {
  local name pid
  for name in client.rgw osd.0 mon.a; do
    [ -s "$dir/$name.pid" ] || continue
    pid=$(cat "$dir/$name.pid")
    kill "$pid" 2>/dev/null || continue
    for _ in $(seq 100); do
      kill -0 "$pid" 2>/dev/null || break
      sleep 0.05
    done
    kill -9 "$pid" 2>/dev/null || true
  done
  rm -rf "$dir"
}

case $action in
  start) start ;;
  stop) stop ;;
  *) echo "start or stop, not $action" >&2; exit 2 ;;
esac
