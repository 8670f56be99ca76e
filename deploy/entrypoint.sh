#!/bin/sh
# The CPU kernels were compiled into the image; the cache, where the server looks for them, is in the data volume,
# because converted models are kept there too. Old ones stay: their folder is named after their source.
set -eu
mkdir -p "$PAGETURNER_CACHE"
cp -R /opt/pageturner/prebuilt/. "$PAGETURNER_CACHE/"
exec pageturner "$@"
