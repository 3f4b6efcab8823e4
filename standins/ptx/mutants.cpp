// SPDX-License-Identifier: Apache-2.0
#include "mutants.hpp"

#include <algorithm>
#include <cctype>
#include <fstream>
#include <map>
#include <optional>
#include <string_view>
#include <utility>

namespace ptx {

namespace {

constexpr const char* name(scope s) {
    switch (s) {
        case scope::thread: return "thread";
        case scope::cta: return "cta";
        case scope::gpu: return "gpu";
        case scope::sys: return "sys";
    }
    return "";
}
constexpr const char* name(operation o) {
    switch (o) {
        case operation::load: return "load";
        case operation::store: return "store";
        case operation::atomic: return "atomic";
        case operation::fence: return "fence";
        case operation::barrier: return "barrier";
        case operation::warp_barrier: return "barrier of a warp";
        default: return "";
    }
}

// ---- the mutations of an instruction

struct weaker {
    std::string what{};
    instruction instead{};
};

class weakening {
public:
    explicit weakening(const instruction& i) : i_(i) {
        switch (i_.what) {
            case operation::load:
            case operation::store:
            case operation::atomic:
                if (i_.ordering != order::weak && i_.where != space::shared) access();
                break;
            case operation::fence:
                if (i_.ordering == order::sc) order_of(order::acq_rel, "sc to acq_rel");
                left_out();
                narrower();
                break;
            case operation::barrier:
            case operation::warp_barrier: left_out(); break;
            default: break;
        }
    }
    [[nodiscard]] std::vector<weaker> all() && { return std::move(all_); }

private:
    void access() {
        if (i_.ordering == order::acq_rel && i_.what == operation::atomic) {
            order_of(order::acquire, "acq_rel to acquire");
            order_of(order::release, "acq_rel to release");
        } else if (i_.ordering != order::relaxed) {
            order_of(order::relaxed, i_.ordering == order::acquire ? "acquire to relaxed" : "release to relaxed");
        } else if (i_.what != operation::atomic) {
            instruction weak = i_;
            weak.ordering = order::weak;
            weak.reach = scope::thread;
            add(weak, "relaxed to weak");
        }
        narrower();
    }
    void order_of(order o, const char* how) {
        instruction weak = i_;
        weak.ordering = o;
        add(weak, how);
    }
    void narrower() {
        if (i_.reach <= scope::cta) return;
        instruction narrow = i_;
        narrow.reach = i_.reach == scope::sys ? scope::gpu : scope::cta;
        add(narrow, std::string(name(i_.reach)) + " to " + name(narrow.reach));
    }
    void left_out() {
        instruction none = i_;
        none.guard = 0;
        none.negated = true;
        add(none, "left out");
    }
    void add(const instruction& instead, const std::string& how) {
        all_.push_back({std::string(name(i_.what)) + ", " + how, instead});
    }

    const instruction& i_;
    std::vector<weaker> all_{};
};

/// The comparisons of integers that exclude or include equality, by the functions by which the
/// decoder knows them.
const std::map<word (*)(word, word, word), std::pair<std::string, word (*)(word, word, word)>>& off_by_one() {
    static const auto all = [] {
        std::map<word (*)(word, word, word), std::pair<std::string, word (*)(word, word, word)>> made;
        const std::map<std::string, std::string> other{{"lt", "le"}, {"le", "lt"}, {"gt", "ge"}, {"ge", "gt"}};
        for (const auto& [from, to] : other)
            for (const std::string type : {"u32", "s32", "u64", "s64"}) {
                const pure* const before = find_pure("setp." + from + "." + type);
                const pure* const after = find_pure("setp." + to + "." + type);
                if (before != nullptr && after != nullptr)
                    made.emplace(before->compute, std::pair(from + " to " + to, after->compute));
            }
        return made;
    }();
    return all;
}

// ---- the place of an instruction in the source

class sources {
public:
    /// "FILE, FUNCTION: the line", without the comment behind the code, so that a reworded comment
    /// doesn't change a mutant's name.
    [[nodiscard]] std::string place(const std::string& path, std::uint32_t line) {
        const std::string file = path.substr(path.rfind('/') + 1);
        const auto& all = lines_of(path);
        if (line == 0 || line > all.size()) return file + ":" + std::to_string(line);
        return file + ", " + function_of(all, line - 1) + ": " + trimmed(without_comment(all[line - 1]));
    }

private:
    const std::vector<std::string>& lines_of(const std::string& path) {
        const auto [at, fresh] = files_.try_emplace(path);
        if (fresh) {
            std::ifstream in(path);
            for (std::string line; std::getline(in, line);) at->second.push_back(line);
        }
        return at->second;
    }
    static std::string_view without_comment(std::string_view line) { return line.substr(0, line.find("  // ")); }
    static std::string trimmed(std::string_view line) {
        const std::size_t first = line.find_first_not_of(" \t");
        return first == line.npos ? "" : std::string(line.substr(first, line.find_last_not_of(" \t") - first + 1));
    }
    /// The last function before the line that is declared for devices.
    static std::string function_of(const std::vector<std::string>& all, std::size_t line) {
        for (std::size_t at = line + 1; at-- > 0;) {
            for (const std::string_view mark : {"GPUSHARE_HD", "__device__"}) {
                const std::size_t found = all[at].find(mark);
                if (found == std::string::npos) continue;
                const std::string declared =
                    all[at].substr(found + mark.size()) + (at + 1 < all.size() ? all[at + 1] : "");
                std::size_t end = declared.find('(');
                std::size_t begin = end == std::string::npos ? 0 : end;
                while (begin > 0 && (std::isalnum(static_cast<unsigned char>(declared[begin - 1])) != 0 ||
                                     declared[begin - 1] == '_'))
                    --begin;
                if (end != std::string::npos && end > begin) return declared.substr(begin, end - begin);
            }
        }
        return "?";
    }

    std::map<std::string, std::vector<std::string>> files_;
};

/// Collects the changes that belong to one place and to one kind of mutation.
class gathering {
public:
    void add(const program& p, function& f, std::size_t at, bool primitive, const weaker& w) {
        const text::location& l = f.sources[at];
        // An order is requested where a primitive was inlined, not inside the primitive.
        const bool inlined = primitive && l.callers[0].line != 0;
        const auto place_of = [&](std::uint32_t file, std::uint32_t line) {
            return line != 0 && file < p.files.size() ? sources_.place(p.files[file], line)
                                                      : f.name + ", PTX line " + std::to_string(f.code[at].line);
        };
        std::string place = inlined ? place_of(l.callers[0].file, l.callers[0].line) : place_of(l.file, l.line);
        // A function that only selects a scope isn't the place either; its caller is.
        const bool chooses = place.starts_with("session.hpp, release:") || place.starts_with("session.hpp, acquired:");
        if (inlined && chooses && l.callers[1].line != 0) place = place_of(l.callers[1].file, l.callers[1].line);
        mutant& m = all_[{place, w.what}];
        m.place = place;
        m.what = w.what;
        m.changes.push_back({&f, at, w.instead});
    }
    [[nodiscard]] std::vector<mutant> list() && {
        std::vector<mutant> every;
        for (auto& [key, m] : all_) every.push_back(std::move(m));
        return every;
    }

private:
    sources sources_;
    std::map<std::pair<std::string, std::string>, mutant> all_;
};

}  // namespace

std::vector<mutant> mutants_of(std::span<const program* const> all) {
    gathering found;
    for (const program* p : all)
        for (const auto& f : p->functions)
            for (std::size_t at = 0; at < f->code.size(); ++at)
                for (const weaker& w : weakening(f->code[at]).all()) found.add(*p, *f, at, true, w);
    return std::move(found).list();
}

std::vector<mutant> bounds_of(std::span<const program* const> all) {
    gathering found;
    for (const program* p : all)
        for (const auto& f : p->functions)
            for (std::size_t at = 0; at < f->code.size(); ++at) {
                const auto other = off_by_one().find(f->code[at].compute);
                // A comparison without a line was made by the compiler, to choose a shortcut.
                if (other == off_by_one().end() || f->sources[at].line == 0) continue;
                weaker w{other->second.first, f->code[at]};
                w.instead.compute = other->second.second;
                found.add(*p, *f, at, false, w);
            }
    return std::move(found).list();
}

void forget_what_ran(const program& p) {
    for (const auto& f : p.functions)
        for (const instruction& i : f->code) i.ran = false;
}

bool ran(const mutant& m) {
    return std::ranges::any_of(m.changes, [](const auto& c) { return c.in->code[c.at].ran; });
}

}  // namespace ptx
