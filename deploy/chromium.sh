#!/usr/bin/env bash
# Finds the Chromium that the browser tests drive; installs Debian's where that is possible (root and apt).
# Never fails outside CI: without a browser those tests are skipped, and say so.
set -u

for name in "${CHROMIUM:-}" chromium chromium-browser google-chrome; do
  if [ -n "$name" ] && command -v "$name" >/dev/null 2>&1; then exit 0; fi
done

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
  echo '==> installing chromium for the browser tests'
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium >/dev/null
fi

if command -v chromium >/dev/null 2>&1; then exit 0; fi
echo 'note: no Chromium found; the browser tests will be skipped (set CHROMIUM=/path/to/chromium)' >&2
[ "${CI:-}" != true ]
