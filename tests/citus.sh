#!/bin/bash
# A Citus cluster for tests: a coordinator and workers on loopback ports, from the Citus that is installed for the
# PostgreSQL in THUNDER_PG_BIN or PATH.
#
#   tests/citus.sh start FOLDER [WORKERS]   starts a new cluster, prints the coordinator's DATABASE_URL
#   tests/citus.sh stop FOLDER              stops it and removes the folder
#   tests/citus.sh node FOLDER NAME COMMAND controls a node (coordinator, worker1, …): start, kill, url
#   tests/citus.sh check                    runs the checks of tests/it/database on a cluster, before and after
#                                           `thunder db distribute`
set -euo pipefail

# The test that runs them.
CHECKS=database::every_check_passes_on_an_external_database

bin=${THUNDER_PG_BIN:-$(ls -d /usr/lib/postgresql/*/bin 2>/dev/null | sort -V | tail -1 || true)}
bin=${bin:-$(dirname "$(command -v initdb)")}

# PostgreSQL refuses root.
as_postgres() {
    if [ "$(id -u)" = 0 ]; then runuser -u postgres -- "$@"; else "$@"; fi
}

free_port() {
    python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

url() {
    echo "postgres://postgres@127.0.0.1:$(cat "$1/port")/thunder"
}

sql() {
    as_postgres "$bin/psql" "$1" -XqAt -v ON_ERROR_STOP=1 -c "$2"
}

start_node() {
    as_postgres "$bin/pg_ctl" start -w -s -t 60 -D "$1/data" -l "$1/log" -o "-p $(cat "$1/port") -k $1"
}

new_node() {
    local node=$1
    as_postgres mkdir -m 700 "$node"
    as_postgres "$bin/initdb" -D "$node/data" -U postgres -A trust --no-locale -E UTF8 >/dev/null
    free_port | as_postgres tee "$node/port" >/dev/null
    # `sslmode` is Citus' own default between nodes; the nodes of this cluster are one machine.
    as_postgres tee -a "$node/data/postgresql.conf" >/dev/null <<CONF
shared_preload_libraries = 'citus'
citus.node_conninfo = 'sslmode=disable'
listen_addresses = '127.0.0.1'
max_connections = 200
max_prepared_transactions = 200
shared_buffers = '64MB'
wal_level = logical
CONF
    start_node "$node"
    sql "postgres://postgres@127.0.0.1:$(cat "$node/port")/postgres" 'create database thunder'
    sql "$(url "$node")" 'create extension citus'
}

start() {
    local folder=$1 workers=${2:-2} coordinator="$1/coordinator"
    if ! [ -e "$("$bin/pg_config" --sharedir)/extension/citus.control" ]; then
        echo "citus.sh: Citus is not installed for the PostgreSQL in $bin" >&2
        exit 3
    fi
    mkdir -p "$folder"
    if [ "$(id -u)" = 0 ]; then chown postgres "$folder"; fi
    new_node "$coordinator"
    sql "$(url "$coordinator")" "select citus_set_coordinator_host('127.0.0.1', $(cat "$coordinator/port"))" >/dev/null
    for number in $(seq "$workers"); do
        new_node "$folder/worker$number"
        sql "$(url "$coordinator")" "select citus_add_node('127.0.0.1', $(cat "$folder/worker$number/port"))" >/dev/null
    done
    url "$coordinator"
}

stop() {
    for node in "$1"/*/; do
        as_postgres "$bin/pg_ctl" stop -s -m immediate -D "$node/data" || true
    done
    rm -rf "$1"
}

node() {
    local node="$1/$2"
    case $3 in
        start) start_node "$node" ;;
        # Kills every process of the node, as when its machine fails: backends outlive a killed postmaster for a moment.
        kill)
            local postmaster
            postmaster=$(head -1 "$node/data/postmaster.pid")
            # shellcheck disable=SC2046 # one argument a process
            kill -9 "$postmaster" $(ps -o pid= --ppid "$postmaster") 2>/dev/null || true
            # In a container without an init process the process id stays in use, and the next start would trust the
            # file.
            rm -f "$node/data/postmaster.pid" "$node"/.s.PGSQL.*
            ;;
        url) url "$node" ;;
        *) echo "citus.sh: unknown command '$3'" >&2; exit 2 ;;
    esac
}

check() {
    local folder url
    cd "$(dirname "$0")/.."
    folder=$(mktemp -d /tmp/thunder-citus-XXXXXX)
    chmod 755 "$folder"
    # shellcheck disable=SC2064 # the variable is expanded now
    trap "stop '$folder/cluster'; rm -rf '$folder'" EXIT
    url=$(start "$folder/cluster" | tail -1)
    cargo test --locked --test it --no-run
    for tables in local distributed; do
        if [ $tables = distributed ]; then
            # built for the tests
            target/debug/thunder db distribute --database-url "$url" --data-dir "$folder/data"
        fi
        THUNDER_TEST_DATABASE_URL=$url cargo test --locked --test it -- --exact "$CHECKS" | tee "$folder/result"
        grep -q "^test result: ok. 1 passed" "$folder/result"
        echo "citus.sh: every check passes on $tables tables"
    done
}

case ${1:-} in
    start | stop | node | check) "$@" ;;
    *) sed -n '2,10s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
