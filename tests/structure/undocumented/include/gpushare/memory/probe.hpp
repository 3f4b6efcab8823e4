// SPDX-License-Identifier: Apache-2.0
// One public name of each kind without documentation, each called bare, for the test that
// undocumented.sh finds these and no others. Never compiled.
#pragma once

namespace gpushare {
inline namespace GPUSHARE_ABI {

template <class T>
concept bare_concept = requires(T t) {
    t.run();
};

struct bare_struct {
    int bare_field;
};

/// Documented.
struct documented {
    int field;  ///< Documented.
    int bare_field;
    documented(const documented&) = delete;
    documented& operator=(const documented&) = default;
    explicit documented(int bare_constructor);
    void bare_member();
    void bare_constrained(auto x) requires std::integral<decltype(x)> {}
    friend bool operator==(documented, documented) = default;
    friend bool bare_friend(documented) { return true; }
    using bare_alias = int;

private:
    int internal_;
};

enum class bare_enumeration {};
/// Documented.
enum class enumeration { bare_enumerator, enumerator /**< Documented. */ };
GPUSHARE_HD void bare_function();
template <class T>
using bare_template = T;
inline constexpr int bare_constant = 1;

namespace detail {
void internal();
}
namespace bare_namespace {}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare

#define BARE_MACRO 1
