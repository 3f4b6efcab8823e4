// SPDX-License-Identifier: Apache-2.0
// Both sides agree on every type, and what one makes the other uses: quotas, exceptions, nodes.
#include <cstdio>
#include <cstring>

#include "sides.hpp"

namespace {

int failures = 0;

void expect(bool holds, const char* what) {
    if (holds) return;
    std::printf("not so: %s\n", what);
    ++failures;
}

void compare_layouts(const contract::side& a, const contract::side& b) {
    expect(a.layouts.size() == b.layouts.size(), "both sides list the same types");
    for (std::size_t i = 0; i < a.layouts.size() && i < b.layouts.size(); ++i) {
        const contract::layout &x = a.layouts[i], &y = b.layouts[i];
        if (std::strcmp(x.what, y.what) == 0 && x.size == y.size && x.alignment == y.alignment) continue;
        std::printf("%s: %zu, %zu by %s; %zu, %zu by %s\n", x.what, x.size, x.alignment, a.compiler, y.size,
                    y.alignment, b.compiler);
        ++failures;
    }
}

}  // namespace

int main() {
    const contract::side gcc = contract::by_gcc(), nvcc = contract::by_nvcc();
    compare_layouts(gcc, nvcc);
    expect(gcc.version == nvcc.version, "an inline variable has one address");

    gpushare::quota quota{gpushare::bytes{1000}};
    gcc.charge(quota, gpushare::bytes{600});
    nvcc.charge(quota, gpushare::bytes{400});
    for (const auto& side : {gcc, nvcc}) {
        try {
            side.charge(quota, gpushare::bytes{1});
            expect(false, "a full quota refuses");
        } catch (const gpushare::memory_error& e) {
            expect(e.code() == gpushare::errc::over_quota && e.tenant() == "chat", "an exception keeps what it says");
        }
    }

    gpushare::host::node node{{.sms = 2}};
    expect(gcc.run_on(node) == 100 && nvcc.run_on(node) == 100, "both run kernels on one host node");

    const gpushare::errc why = gcc.open_node();
    expect(why == nvcc.open_node(), "both find the same devices");
    std::printf("%zu layouts agree; CUDA: %s\n", gcc.layouts.size(), gpushare::to_string(why).data());
    return failures == 0 ? 0 : 1;
}
