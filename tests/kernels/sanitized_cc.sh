#!/bin/sh
# gcc with AddressSanitizer and UBSan, which do not run in gcc itself. The last -O wins: -O3 takes minutes with them.
unset LD_PRELOAD
exec gcc "$@" -O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined
