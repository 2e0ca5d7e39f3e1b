# Installs into /layer what a lock of hashes names, or the wheels in a folder, as a layer of /home/venv.
#
#   install.sh LOCK [INDEX]     or     install.sh FOLDER
set -eu
what=$1 index=${2:-}
pip() { python -m pip --python /home/venv/bin/python install --quiet --no-deps --root /layer "$@"; }
if [ -d "$what" ]; then
    pip --no-index "$what"/*.whl
else
    # --no-deps: the lock is complete, and pip is not to look for what it leaves out on purpose.
    pip --require-hashes --only-binary :all: ${index:+--extra-index-url "$index"} -r "$what"
fi
# Packages' own tests are nobody's use in an image.
packages=$(cd /layer/home/venv/lib/python3*/site-packages && pwd)
find "$packages" -type d \( -name tests -o -name test \) ! -path '*/marserve*' -prune -exec rm -rf {} +
rm -rf /layer/var /layer/root
