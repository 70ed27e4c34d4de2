#!/usr/bin/env bash
# Builds the image of k8s/Dockerfile by buildah, without a registry of images, and asks the embedded model a question in it: as
# user 1000, on a read-only root, in namespaces of its own. Needs root, 12 GB of disk, and pip's configuration of this machine.
#
#     .ci/image.sh FOLDER        what is built stays in FOLDER
#
# TORCH: as `make setup TORCH=...`; a build for CPUs unless it is set.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mkdir -p "$1"
folder=$(realpath "$1")
base=localhost/outrider-base image=localhost/outrider
python=${PYTHON:-python3}

buildah() { command buildah --root "$folder/storage" --runroot "$folder/run" --storage-driver vfs "$@"; }

# The base: Debian 12 with its Python 3.11.
if ! buildah inspect --type image "$base" >/dev/null 2>&1; then
    rm -rf "$folder/base"
    debootstrap --variant=minbase --include=ca-certificates,python3-venv,python-is-python3 bookworm "$folder/base"
    container=$(buildah from scratch)
    buildah copy --quiet "$container" "$folder/base" /
    buildah commit --quiet --rm "$container" "$base"
    rm -rf "$folder/base"
fi

# pip in the build finds what pip finds here.
{
    echo '[global]'
    "$python" -m pip config list | sed -nE "s/^[^.]*\.([a-z-]+)='(.*)'$/\1 = \2/p" | sort --unique --field-separator== --key=1,1
} >"$folder/pip.conf"
mounted=("$folder/pip.conf:/etc/pip.conf:ro" /etc/ssl/certs:/etc/ssl/certs:ro)
for path in $(sed -nE 's/^(find-links|constraint|extra-index-url) = //p' "$folder/pip.conf"); do
    path=${path#file://} path=${path%/simple}
    if [[ -e $path ]]; then mounted+=("$path:$path:ro"); fi
done
buildah bud --isolation chroot --layers=false --file k8s/Dockerfile --ignorefile k8s/Dockerfile.dockerignore --tag "$image" \
    --build-arg "BASE=$base" --build-arg "TORCH=${TORCH:-torch==2.13.0+cpu}" "${mounted[@]/#/--volume=}" .

container=$(buildah from "$image")
root=$(buildah mount "$container")
trap 'buildah rm "$container" >/dev/null' EXIT
# As a pod of the chart: a read-only root, and empty folders for /tmp and the home.
cat >"$folder/pod.sh" <<'POD'
set -eu
root=$1
ip link set lo up
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -t tmpfs tmpfs "$root/dev/shm"
mount -t tmpfs tmpfs "$root/tmp"
mount -t tmpfs -o uid=1000,gid=1000 tmpfs "$root/home/outrider"
mount -o remount,ro,bind "$root"
exec chroot --userspec=1000:1000 "$root" env --ignore-environment PATH=/opt/outrider/venv/bin:/usr/bin:/bin HOME=/home/outrider \
    OUTRIDER_HOME=/home/outrider/cache sh -euc '
        cp -R /opt/outrider/cache /home/outrider/
        cd
        ! touch /opt/outrider/written 2>/dev/null
        [ "$(id -u)" = 1000 ]
        outrider serve & serving=$!
        python - <<PYTHON
import json, os, time, urllib.request
url, until_s = "http://127.0.0.1:8000/v1/chat/completions", time.monotonic() + 300
body = {"model": "smollm2-135m", "messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 16,
        "temperature": 0}
while True:
    try:
        asked = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=60) as answer:
            print(json.load(answer)["choices"][0]["message"]["content"])
        break
    except OSError:
        if time.monotonic() > until_s or not os.path.exists("/proc/$serving"):
            raise
        time.sleep(1)
PYTHON
        kill $serving
        wait $serving'
POD
unshare --net --mount --pid --fork --kill-child bash "$folder/pod.sh" "$root" | tee "$folder/answer.txt"
test -s "$folder/answer.txt"
