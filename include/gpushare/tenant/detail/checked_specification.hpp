// SPDX-License-Identifier: Apache-2.0
// Refuses fields of a specification that make no sense however much room there is. The error has
// the field's name and value.
//
//   // throws "tenant 'chat': slo = -5000000 ns: must not be negative"
//   detail::check_admission(spec);
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/tenant/detail/changeable_fields.hpp>
#include <gpushare/tenant/specification.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// Throws operation_error (invalid_specification) with the tenant's name and the text `why`.
template <class... Parts>
[[noreturn]] void refuse_field(const tenant_spec& of, const Parts&... why) {
    message m;
    m.of(of.name).add(why...);
    throw operation_error(failure{errc::invalid_specification}, of.name, m);
}

/// Throws operation_error (invalid_specification).
template <class Value>
void check_field(bool right, const tenant_spec& of, std::string_view field, const Value& value, std::string_view unit,
                 std::string_view must) {
    if (!right) refuse_field(of, field, " = ", value, unit, ": must ", must);
}

/// Throws operation_error (invalid_specification).
inline void check_fields(const tenant_spec& s) {
    if (s.memory == bytes{} && s.burst == bytes{}) refuse_field(s, "needs memory, or burst: both are 0");
    const auto time = [&](ns value, std::string_view field) {
        check_field(value >= ns{0}, s, field, std::string_view(std::to_string(value.count())), " ns",
                    "not be negative");
    };
    time(s.slo, "slo");
    time(s.longest, "longest");
    time(s.yields_within, "yields_within");
    time(s.wait.value_or(ns{}), "wait");
    check_field(s.keeps.valid(), s, "keeps", std::string_view(std::to_string(s.keeps.given())), "",
                "be a part of the SMs, from 0 to 1");
    check_field(s.narrowest.valid(), s, "narrowest", std::string_view(std::to_string(s.narrowest.given())), "",
                "be a part of the SMs, from 0 to 1");
    check_field(s.cap != share{}, s, "cap", std::uint64_t{s.cap.permille()}, " permille", "be more than 0");
    check_field(s.unit != bytes{}, s, "unit", s.unit, "", "be at least 1 B");
    check_field(s.streams != 0, s, "streams", std::uint64_t{s.streams}, "", "be at least 1");
    check_field(s.devices != 0, s, "devices", std::uint64_t{s.devices}, "", "be at least 1");
}

/// The same for a cap that is to be soft.
inline void check_soft_cap(const tenant_spec& s) {
    check_field(s.cap < share::whole(), s, "soft_cap", std::string_view("yes"), "", "go with a cap below 100 %");
}

/// The same for the tenant to be admitted.
inline void check_admission(const tenant_spec& s) {
    if (s.name.empty()) refuse_field(s, "a tenant needs a name");
    check_fields(s);
    if (s.soft_cap) check_soft_cap(s);
}

/// The same for the specification that a tenant would have after a change. Also throws
/// operation_error (not_whole).
inline void check_change(const tenant_spec& granted, const tenant_change& c) {
    tenant_spec then = granted;
    apply_change(c, then);
    check_fields(then);
    if (c.soft_cap.value_or(false)) check_soft_cap(then);
    const bytes step = then.unit * then.devices;
    const auto whole = [&](const auto& value, std::string_view field) {
        if (!value || *value % step == bytes{} || *value == bytes::max()) return;
        message m;
        m.of(then.name).add(field, " = ", *value, ": must be whole in units of ", then.unit, " on each of its devices");
        throw operation_error(failure{errc::not_whole}, then.name, m);
    };
    whole(c.memory, "memory");
    whole(c.burst, "burst");
}

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
