# SPDX-License-Identifier: Apache-2.0
# Picks out of CTest's log what failed, so that it stands last, below the output of all else:
# assertions of Catch2 with their test's name, and the head of each sanitizer's report.
#   awk -f failures.awk build/host/Testing/Temporary/LastTest.log

/^[0-9]+\/[0-9]+ Testing: / { program = $3; name = ""; named = left = 0 }
/^Output:$/ { getline; next }  # the rule below it encloses no name
/^-----*$/ { named = !named; if (named) name = ""; next }
named { name = name (name == "" ? "" : " ") $0; next }

/: FAILED:|^==[0-9]+==ERROR: |^WARNING: ThreadSanitizer|: runtime error: |^Assertion |: Assertion / {
    if (++failures <= 20) {
        print "-- " program ": " name
        left = /FAILED:/ ? 12 : 30
    }
}
left > 0 { print; if (--left == 0 || /^=====*$/) { left = 0; print "" } }

END { if (failures > 20) print "-- and " failures - 20 " more" }
