#!/bin/sh
# The browser tests need a real browser. The package of Debian or Ubuntu is sufficient.
set -u
for name in chromium chromium-browser google-chrome; do
    command -v "$name" >/dev/null 2>&1 && exit 0
done

if ! command -v apt-get >/dev/null 2>&1; then
    echo "no Chromium and no apt-get found: install Chromium, or the browser tests are skipped" >&2
    exit 0
fi
as_root=
if [ "$(id -u)" -ne 0 ]; then
    if ! sudo -n true 2>/dev/null; then
        echo "no Chromium found: 'sudo apt-get install chromium', or the browser tests are skipped" >&2
        exit 0
    fi
    as_root=sudo
fi
echo "installing Chromium for the browser tests"
export DEBIAN_FRONTEND=noninteractive
$as_root apt-get update -qq && $as_root apt-get install -y -qq chromium >/dev/null
