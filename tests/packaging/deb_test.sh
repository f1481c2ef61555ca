#!/usr/bin/env bash
# Makes the Debian package of a build and looks into it: deb_test.sh BUILD_FOLDER. Exit code 77: tools are missing here.
set -euo pipefail

build=$1
for tool in cpack dpkg-deb dpkg-shlibdeps file; do
  command -v "$tool" >/dev/null || { echo "skipped: $tool is missing"; exit 77; }
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() { echo "deb_test: $*" >&2; exit 1; }

(cd "$build" && cpack -G DEB -B "$work" >"$work/log" 2>&1) || { cat "$work/log"; fail "cpack failed"; }
deb=$(ls "$work"/quern_*.deb)
echo "$(basename "$deb"): $(stat -c %s "$deb") bytes"

# What the package says of itself.
field() { dpkg-deb -f "$deb" "$1"; }
[ "$(field Package)" = quern ] || fail "its name is $(field Package)"
[ "$(field Architecture)" = "$(dpkg --print-architecture)" ] || fail "its architecture is $(field Architecture)"
depends=$(field Depends)
echo "depends on $depends"
for library in libc6 libstdc++6 libfmt libssl libicu libprometheus-cpp-core; do
  [[ $depends == *$library* ]] || fail "$library is not among what it depends on: $depends"
done
[[ $depends != *-dev* ]] || fail "it depends on headers: $depends"

# What is in it.
dpkg-deb -c "$deb" >"$work/list"
for path in ./usr/bin/quern ./usr/lib/systemd/system/quern.service ./etc/default/quern ./usr/share/doc/quern/copyright ./usr/share/doc/quern/README.md \
            ./usr/share/doc/quern/operations.md ./usr/share/quern/grafana/quern.json \
            ./usr/share/quern/haproxy/quern.cfg ./usr/share/quern/prometheus/quern.rules.yml ./usr/share/man/man1/quern.1.gz ./usr/share/man/man1/quern-serve.1.gz \
            ./usr/share/bash-completion/completions/quern ./usr/share/zsh/vendor-completions/_quern ./usr/share/fish/vendor_completions.d/quern.fish; do
  grep -q " $path\$" "$work/list" || { cat "$work/list"; fail "$path is not in it"; }
done
awk '$2 != "root/root" { print; bad = 1 } END { exit bad }' "$work/list" || fail "files that are not root's"
awk '$1 ~ /^-.......w/ { print; bad = 1 } END { exit bad }' "$work/list" || fail "files that everybody may write"
! grep -E ' \./(usr/local|tmp|root|work)/' "$work/list" || fail "files where a package has none"
[ "$(dpkg-deb --info "$deb" conffiles)" = /etc/default/quern ] || fail "its settings would be overwritten by an upgrade"

# It can be unpacked, its program runs, and its scripts survive where there is no systemd.
root=$work/root
dpkg-deb -x "$deb" "$root"
"$root/usr/bin/quern" --version
gzip -dc "$root/usr/share/man/man1/quern-serve.1.gz" | grep -q 'ssl.*certfile' || fail "the manual of serve lacks its options"
! file "$root/usr/bin/quern" | grep -q 'not stripped' || fail "the program is not stripped"
! grep -q "$build" "$root/usr/bin/quern" || fail "the program names the folder that it was built in"
dpkg-deb -e "$deb" "$work/control"
for script in postinst prerm postrm; do sh -n "$work/control/$script"; done
mkdir -p "$root/var/lib/dpkg"/{info,updates} && touch "$root/var/lib/dpkg/status"
if [ "$(id -u)" = 0 ]; then
  dpkg --root="$root" --force-not-root --force-depends --force-script-chrootless --log=/dev/null -i "$deb" >"$work/log" 2>&1 || { cat "$work/log"; fail "dpkg -i failed"; }
  [ "$(dpkg-query --admindir="$root/var/lib/dpkg" -W -f='${db:Status-Status}' quern)" = installed ] || fail "dpkg does not count it as installed"
  dpkg --root="$root" --force-not-root --force-script-chrootless --log=/dev/null -P quern >"$work/log" 2>&1 || { cat "$work/log"; fail "dpkg -P failed"; }
  [ ! -e "$root/usr/bin/quern" ] && [ ! -e "$root/etc/default/quern" ] || fail "purging leaves files behind"
fi

# The unit says what systemd understands.
if command -v systemd-analyze >/dev/null; then
  unit=$work/quern.service
  dpkg-deb --fsys-tarfile "$deb" | tar -xO ./usr/lib/systemd/system/quern.service | sed "s,/usr/bin/quern,$build/quern," >"$unit"
  complaints=$(systemd-analyze verify --man=no "$unit" 2>&1 | grep -F quern.service || true)
  [ -z "$complaints" ] || fail "systemd-analyze: $complaints"
fi
echo "the package is sound"
