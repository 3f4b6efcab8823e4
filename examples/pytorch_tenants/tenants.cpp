// SPDX-License-Identifier: Apache-2.0
#include "pytorch_tenants/tenants.hpp"

#include <torch/headeronly/version.h>

#include <deque>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include <gpushare/backend/cuda/node.hpp>
#include <gpushare/interop/libtorch.hpp>
#include <gpushare/tenant/specification_text.hpp>
#include <gpushare/tenant/tenancy.hpp>

namespace {

using node = gpushare::cuda::node;
using tenancy = gpushare::tenancy<node>;
using scope = gpushare::torch_scope<node, tenancy::tenant>;
using inside = decltype(std::declval<scope&>().enter());

/// One tenant. Its scope is destroyed first.
struct member {
    member(node& on, tenancy& of, gpushare::tenant_spec what) : who(of.admit(std::move(what))), in_torch(on, who) {}
    tenancy::tenant who;
    scope in_torch;
};

struct world {
    world(int device, std::string_view text) : devices({.devices = {device}}) {
        for (auto& s : gpushare::parse_specifications(text)) members.emplace_back(devices, shared, std::move(s));
        if (members.empty()) throw std::invalid_argument("the text has no tenant");
    }
    [[nodiscard]] member& of(std::string_view name) {
        for (auto& m : members)
            if (m.who.name() == name) return m;
        throw std::invalid_argument("no tenant '" + std::string(name) + "'");
    }
    node devices;
    tenancy shared{devices};
    std::deque<member> members;
};

/// Never destroyed, because PyTorch frees its last tensors when the process ends.
std::unique_ptr<world>& running() {
    static auto* const all = new std::unique_ptr<world>;
    return *all;
}
world& started() {
    if (running() == nullptr) throw std::logic_error("tenants aren't started");
    return *running();
}
std::string& problem() {
    static thread_local std::string text;
    return text;
}

/// Returns f(), or `failed`.
template <class R, class F>
R guarded(R failed, F f) noexcept {
    try {
        return f();
    } catch (const std::exception& e) {
        problem() = e.what();
    } catch (...) {
        problem() = "an unknown exception";
    }
    return failed;
}
constexpr auto nothing = static_cast<std::uint64_t>(-1);

}  // namespace

extern "C" {

const char* tenants_torch() noexcept {
    static const std::string version = std::to_string(TORCH_VERSION_MAJOR) + "." + std::to_string(TORCH_VERSION_MINOR);
    return version.c_str();
}
int tenants_start(int device, const char* text) noexcept {
    return guarded(-1, [&] {
        if (running() != nullptr) throw std::logic_error("tenants are started already");
        running() = std::make_unique<world>(device, text);
        return 0;
    });
}
void* tenants_enter(const char* name) noexcept {
    return guarded(static_cast<void*>(nullptr),
                   [&]() -> void* { return new inside(started().of(name).in_torch.enter()); });
}
void tenants_leave(void* it) noexcept { delete static_cast<inside*>(it); }
std::uint64_t tenants_used(const char* name) noexcept {
    return guarded(nothing, [&] { return started().of(name).in_torch.usage().used.count(); });
}
std::uint64_t tenants_refused(const char* name) noexcept {
    return guarded(nothing, [&] { return started().of(name).who.usage().refused; });
}
void tenants_give_back() noexcept {
    if (running() == nullptr) return;
    for (auto& m : running()->members) m.in_torch.give_back();
}
void tenants_stop() noexcept { running().reset(); }
const char* tenants_problem() noexcept { return problem().c_str(); }
}
