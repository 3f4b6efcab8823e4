// SPDX-License-Identifier: Apache-2.0
#include "support/ptx/mutants.hpp"

#include <algorithm>
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

class weakening {
public:
    weakening(const program& p, function& f, std::size_t at, scope needed, std::vector<mutant>& all)
        : of_(p), in_(f), at_(at), needed_(needed), i_(f.code[at]), all_(all) {}

    void run() {
        switch (i_.what) {
            case operation::load:
            case operation::store:
            case operation::atomic:
                if (i_.ordering == order::weak || i_.where == space::shared) return;
                access();
                break;
            case operation::fence:
                if (i_.ordering == order::sc) weaker(order::acq_rel, "sc to acq_rel");
                left_out();
                narrower();
                break;
            case operation::barrier:
            case operation::warp_barrier: left_out(); break;
            default: break;
        }
    }

private:
    void access() {
        if (i_.ordering == order::acq_rel && i_.what == operation::atomic) {
            weaker(order::acquire, "acq_rel to acquire");
            weaker(order::release, "acq_rel to release");
        } else if (i_.ordering != order::relaxed) {
            weaker(order::relaxed, i_.ordering == order::acquire ? "acquire to relaxed" : "release to relaxed");
        } else if (i_.what != operation::atomic) {
            instruction weak = i_;
            weak.ordering = order::weak;
            weak.reach = scope::thread;
            add(std::move(weak), "relaxed to weak");
        }
        narrower();
    }
    void weaker(order o, const char* how) {
        instruction weak = i_;
        weak.ordering = o;
        add(std::move(weak), how);
    }
    void narrower() {
        if (i_.reach <= scope::cta) return;
        instruction narrow = i_;
        narrow.reach = std::min(i_.reach, needed_) == scope::sys ? scope::gpu : scope::cta;
        add(std::move(narrow), std::string(name(i_.reach)) + " to " + name(narrow.reach));
    }
    void left_out() {
        instruction none = i_;
        none.guard = 0;
        none.negated = true;
        add(std::move(none), "left out");
    }
    void add(instruction instead, std::string how) {
        all_.push_back({&of_, &in_, at_, std::move(instead), std::string(name(i_.what)) + ", " + std::move(how)});
    }

    const program& of_;
    function& in_;
    std::size_t at_;
    scope needed_;
    const instruction& i_;
    std::vector<mutant>& all_;
};

}  // namespace

std::string mutant::describe() const { return what + ": " + ptx::describe(*of, *in, in->code[at]); }

std::vector<mutant> mutants_of(const program& p, scope needed) {
    std::vector<mutant> all;
    for (const auto& f : p.functions)
        for (std::size_t at = 0; at < f->code.size(); ++at)
            if (f->code[at].ran) weakening(p, *f, at, needed, all).run();
    return all;
}

void forget_what_ran(const program& p) {
    for (const auto& f : p.functions)
        for (const instruction& i : f->code) i.ran = false;
}

}  // namespace ptx
