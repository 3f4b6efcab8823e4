# SPDX-License-Identifier: Apache-2.0
# Concepts, enumerators and namespaces without documentation in Doxygen's XML, of which Doxygen doesn't warn.
function text(line) {
    gsub(/^ *<[^>]*>|<[^>]*> *$/, "", line)
    return line
}
function attribute(line, name) {
    if (!match(line, "[ ]" name "=\"[^\"]*\"")) return ""
    return substr(line, RSTART + length(name) + 3, RLENGTH - length(name) - 4)
}
function report(location, name, kind) {
    print attribute(location, "file") ":" attribute(location, "line") ": " name " (" kind ")"
}

/<compounddef / {
    kind = attribute($0, "kind")
    documented = in_section = in_value = values = 0
}
/<compoundname>/ { compound = text($0) }
/<sectiondef / { in_section = 1 }
/<\/sectiondef>/ { in_section = 0 }
/<enumvalue / {
    in_value = 1
    value_documented = 0
    value = ""
}
/<name>/ && in_value && value == "" { value = text($0) }
/<para>/ && in_value { value_documented = 1 }
/<para>/ && !in_section { documented = 1 }
/<\/enumvalue>/ {
    if (!value_documented) undocumented[++values] = value
    in_value = 0
}
/<location / && in_section {
    for (i = 1; i <= values; i++) report($0, undocumented[i], "enumerator")
    values = 0
}
/<location / && !in_section && !documented && (kind == "concept" || kind == "namespace") && compound !~ /(^|::)(detail|std)(::|$)/ {
    report($0, compound, kind)
}
