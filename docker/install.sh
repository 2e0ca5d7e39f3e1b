# Installs into /layer what a lock of hashes names, or the wheels in a folder, as a layer of /home/venv.
#
#   install.sh LOCK [INDEX]     or     install.sh FOLDER
set -eu
what=$1 index=${2:-}
if [ ! -e "$what" ]; then
    echo "There is no lock $what in the checkout; there are: $(echo docker/locks/torch*.txt). Write it for the index of" \
        "your torch, as docs/deploy/docker.md says under Locks, or name one of these by --build-arg TORCH_LOCK=..." >&2
    exit 1
fi
pip() { python -m pip --python /home/venv/bin/python install --quiet --no-deps --root /layer "$@"; }
if [ -d "$what" ]; then
    pip --no-index "$what"/*.whl
else
    # --no-deps: the lock is complete, and pip is not to look for what it leaves out on purpose.
    pip --require-hashes --only-binary :all: ${index:+--extra-index-url "$index"} -r "$what" || {
        echo "pip did not install what $what names (above is why). The locks of torch are for one index, one Python and" \
            "one kind of processor each; this is $(python -V) on $(uname -m)${index:+ with $index}. Another one needs" \
            "another lock: docs/deploy/docker.md, Locks." >&2
        exit 1
    }
fi
# Packages' own tests are nobody's use in an image.
packages=$(cd /layer/home/venv/lib/python3*/site-packages && pwd)
find "$packages" -type d \( -name tests -o -name test \) ! -path '*/marserve*' -prune -exec rm -rf {} +
rm -rf /layer/var /layer/root
