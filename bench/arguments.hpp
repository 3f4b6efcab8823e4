// SPDX-License-Identifier: Apache-2.0
// The command line of a benchmark program: `PROGRAM [OUT.json] [PART]`, plus the program's option
// or --help anywhere. An argument that names a part is always a part, never a file.
//
//   const bench::arguments asked(argc, argv, {"two", "four"}, {"--cold", "with cold caches"});
//   if (asked.wants("two")) two(r, asked.has_option());
//   r.write(asked.json());
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace bench {

/// The one option that a program may have: its name with the dashes, and a description for --help.
struct option {
    std::string_view name, what;
};

class arguments {
public:
    /// Prints the usage and exits if the user asks for help. Throws std::invalid_argument for an
    /// unknown part.
    arguments(int argc, char** argv, std::vector<std::string_view> parts = {}, option o = {})
        : parts_(std::move(parts)) {
        std::vector<std::string_view> given(argv + 1, argv + argc);
        if (std::ranges::any_of(given, [](std::string_view a) { return a == "--help" || a == "-h"; })) {
            std::string usage = parts_.empty() ? "" : " [PART]", about = names();
            if (!o.name.empty()) {
                usage.append(" [").append(o.name).append("]");
                about.append(o.name).append(": ").append(o.what).append("\n");
            }
            std::printf(
                "usage: %s [OUT.json]%s\nPrints figures, and writes them with all their repeats to OUT.json.\n%s",
                argv[0], usage.c_str(), about.c_str());
            std::exit(0);
        }
        if (!o.name.empty()) has_option_ = std::erase(given, o.name) > 0;
        if (given.size() > (parts_.empty() ? 1 : 2))
            throw std::invalid_argument("too many arguments; --help says which there are");
        if (!given.empty() && !is_part(given[0])) {
            json_ = given[0].data();  // an element of argv, so null-terminated
            given.erase(given.begin());
        }
        if (given.empty()) return;
        part_ = given.back();
        if (given.size() > 1) throw std::invalid_argument("only one part at a time");
        if (!is_part(part_)) throw std::invalid_argument("there is no part '" + std::string(part_) + "'. " + names());
    }

    /// Null if the user gave no file.
    [[nodiscard]] const char* json() const noexcept { return json_; }
    /// True if the user asked for `part`, or for no part in particular.
    [[nodiscard]] bool wants(std::string_view part) const noexcept { return part_.empty() || part_ == part; }
    [[nodiscard]] bool wants_only(std::string_view part) const noexcept { return part_ == part; }
    [[nodiscard]] bool has_option() const noexcept { return has_option_; }

private:
    [[nodiscard]] bool is_part(std::string_view name) const { return std::ranges::find(parts_, name) != parts_.end(); }
    [[nodiscard]] std::string names() const {
        if (parts_.empty()) return {};
        std::string text = "Parts:";
        for (const std::string_view p : parts_) text.append(" ").append(p);
        return text + "\n";
    }

    std::vector<std::string_view> parts_;
    bool has_option_ = false;
    const char* json_ = nullptr;
    std::string_view part_;
};

}  // namespace bench
