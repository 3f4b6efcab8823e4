// SPDX-License-Identifier: Apache-2.0
// cuBLASLt's functions according to its documentation, computed on the stand-in when the stream
// reaches them: layouts, leading dimensions, transposes, stacks, factors and epilogues. Calls that
// the documentation forbids are errors. The reference also does everything that a run is allowed to
// do: it overwrites the workspace.
//
//   support::reference_cublaslt::forget();
//   const gpushare::graph::cublaslt_library library(support::reference_cublaslt::functions());
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include <cuda_runtime_api.h>

#include <gpushare/graph/detail/cublaslt_api.hpp>

#include "standins/cuda/standin.hpp"

namespace support {

class reference_cublaslt {
public:
    using lt = gpushare::graph::detail::cublaslt;

    /// What a test sees and sets.
    struct state {
        int handles = 0, objects = 0;      // that exist
        int heuristics = 0, products = 0;  // calls
        int compute = 0;                   // of the last descriptor
        std::size_t workspace = 0;         // that algorithms need
        int create_status = 0, product_status = 0;
        bool without_bias = false;  // a library that is wrong
    };
    static state& now() {
        static state s;
        return s;
    }
    static void forget() { now() = {}; }

    static gpushare::graph::detail::cublaslt_api functions() {
        return {.create = create,
                .destroy = destroy,
                .status_string = [](int) { return "the reference refuses"; },
                .desc_create = desc_create,
                .desc_destroy = gone<desc>,
                .desc_set = desc_set,
                .layout_create = layout_create,
                .layout_destroy = gone<layout>,
                .layout_set = layout_set,
                .preference_create = preference_create,
                .preference_destroy = gone<preference>,
                .preference_set = preference_set,
                .heuristic = heuristic,
                .matmul = matmul};
    }

private:
    static constexpr int not_supported = 15;
    static constexpr std::uint64_t magic = 0x6c74616c676f;

    struct desc {
        std::int32_t transa = 0, transb = 0;
        std::uint32_t epilogue = 1;
        const void* bias = nullptr;
    };
    struct layout {
        std::uint64_t rows = 0, columns = 0;
        std::int64_t leading = 0;
        std::int32_t batch = 1;
        std::int64_t stride = 0;
    };
    struct preference {
        std::uint64_t workspace = 0;
        std::array<std::uint32_t, 4> alignment{256, 256, 256, 256};
    };
    /// A product, with copies of what the caller may change or destroy once the call is over.
    struct product {
        desc how;
        layout a, b, c, d;
        float alpha, beta;
        const float *pa, *pb, *pc;
        float* pd;
        void* workspace;
        std::size_t workspace_size;
        bool with_bias;
    };

    static int create(void** handle) {
        if (now().create_status != 0) return now().create_status;
        *handle = &now();
        ++now().handles;
        return 0;
    }
    static int destroy(void*) {
        --now().handles;
        return 0;
    }
    template <class T>
    static int gone(void* of) {
        delete static_cast<T*>(of);
        --now().objects;
        return 0;
    }
    template <class T>
    static void* made(T of) {
        ++now().objects;
        return new T(of);
    }
    static int desc_create(void** to, int compute, int scale) {
        if (scale != lt::real_32f) return lt::invalid_value;
        now().compute = compute;
        *to = made(desc{});
        return 0;
    }
    static int layout_create(void** to, int type, std::uint64_t rows, std::uint64_t columns, std::int64_t leading) {
        if (type != lt::real_32f) return lt::invalid_value;
        *to = made(layout{.rows = rows, .columns = columns, .leading = leading});
        return 0;
    }
    static int preference_create(void** to) {
        *to = made(preference{});
        return 0;
    }
    template <class T>
    static int take(T& to, const void* value, std::size_t size) {
        if (value == nullptr || size != sizeof to) return lt::invalid_value;
        std::memcpy(&to, value, size);
        return 0;
    }
    static int desc_set(void* of, int attribute, const void* value, std::size_t size) {
        auto& d = *static_cast<desc*>(of);
        switch (attribute) {
            case lt::transa: return take(d.transa, value, size);
            case lt::transb: return take(d.transb, value, size);
            case lt::epilogue: return take(d.epilogue, value, size);
            case lt::bias_pointer: return take(d.bias, value, size);
            default: return lt::invalid_value;
        }
    }
    static int layout_set(void* of, int attribute, const void* value, std::size_t size) {
        auto& l = *static_cast<layout*>(of);
        if (attribute == lt::batch_count) return take(l.batch, value, size);
        return attribute == lt::strided_batch_offset ? take(l.stride, value, size) : lt::invalid_value;
    }
    static int preference_set(void* of, int attribute, const void* value, std::size_t size) {
        auto& p = *static_cast<preference*>(of);
        if (attribute == lt::max_workspace_bytes) return take(p.workspace, value, size);
        const auto at = std::ranges::find(lt::min_alignment, attribute) - lt::min_alignment.begin();
        return at < 4 ? take(p.alignment[static_cast<std::size_t>(at)], value, size) : lt::invalid_value;
    }

    /// Whether the matrices fit each other and don't overlap themselves.
    static bool sound(const desc& how, const layout& a, const layout& b, const layout& c, const layout& d) {
        const auto turned = [](const layout& l, std::int32_t op) {
            return op == lt::op_t ? std::array{l.columns, l.rows} : std::array{l.rows, l.columns};
        };
        const auto of_a = turned(a, how.transa), of_b = turned(b, how.transb);
        for (const auto* l : {&a, &b, &c, &d})
            if (l->rows == 0 || l->columns == 0 || l->leading < static_cast<std::int64_t>(l->rows) ||
                l->batch != d.batch)
                return false;
        const auto apart = static_cast<std::int64_t>(d.columns - 1) * d.leading + static_cast<std::int64_t>(d.rows);
        return of_a[1] == of_b[0] && of_a[0] == d.rows && of_b[1] == d.columns && c.rows == d.rows &&
               c.columns == d.columns && (d.batch == 1 || d.stride >= apart);
    }
    static std::uint64_t alignment_of(const void* p) {
        const auto at = reinterpret_cast<std::uintptr_t>(p) | 256;
        return at & (~at + 1);
    }
    static int heuristic(void* handle, void* how, void* a, void* b, void* c, void* d, void* wanted, int,
                         lt::heuristic* found, int* count) {
        ++now().heuristics;
        const auto& p = *static_cast<preference*>(wanted);
        const auto& of = *static_cast<desc*>(how);
        const bool biased = (of.epilogue & lt::bias) != 0;
        if (handle != &now() || !sound(of, *static_cast<layout*>(a), *static_cast<layout*>(b), *static_cast<layout*>(c),
                                       *static_cast<layout*>(d)))
            return lt::invalid_value;
        *count = now().workspace <= p.workspace && !(biased && of.bias == nullptr) ? 1 : 0;
        *found = {};
        found->algo.data[0] = magic;
        found->algo.data[1] = *std::ranges::min_element(p.alignment);
        found->algo.data[2] = biased ? alignment_of(of.bias) : 1;
        found->workspace = now().workspace;
        return 0;
    }
    static int matmul(void* handle, void* how, const void* alpha, const void* a, void* la, const void* b, void* lb,
                      const void* beta, const void* c, void* lc, void* d, void* ld, const lt::algorithm* algo,
                      void* workspace, std::size_t size, void* stream) {
        ++now().products;
        if (now().product_status != 0) return now().product_status;
        const product p{*static_cast<desc*>(how),
                        *static_cast<layout*>(la),
                        *static_cast<layout*>(lb),
                        *static_cast<layout*>(lc),
                        *static_cast<layout*>(ld),
                        *static_cast<const float*>(alpha),
                        *static_cast<const float*>(beta),
                        static_cast<const float*>(a),
                        static_cast<const float*>(b),
                        static_cast<const float*>(c),
                        static_cast<float*>(d),
                        workspace,
                        size,
                        !now().without_bias};
        if (handle != &now() || !sound(p.how, p.a, p.b, p.c, p.d) || algo->data[0] != magic) return lt::invalid_value;
        for (const void* const at : {a, b, c, static_cast<const void*>(d)})
            if (at == nullptr || alignment_of(at) < algo->data[1]) return lt::invalid_value;
        if ((p.how.epilogue & lt::bias) != 0 && alignment_of(p.how.bias) < algo->data[2]) return lt::invalid_value;
        if (size < now().workspace || (size > 0 && alignment_of(workspace) < 256)) return lt::invalid_value;
        const auto code = standin::detail::launch(static_cast<cudaStream_t>(stream), std::chrono::microseconds(1),
                                                  [p] { compute(p); });
        return code == cudaSuccess ? 0 : not_supported;
    }

    static std::size_t place(const layout& l, std::int32_t op, std::int64_t stack, std::uint64_t row,
                             std::uint64_t column) {
        if (op == lt::op_t) std::swap(row, column);
        return static_cast<std::size_t>(stack * l.stride + static_cast<std::int64_t>(column) * l.leading) + row;
    }
    static void compute(const product& p) {
        if (p.workspace_size > 0) std::memset(p.workspace, 0xff, p.workspace_size);
        const std::uint64_t inner = p.how.transa == lt::op_t ? p.a.rows : p.a.columns;
        std::vector<float> made;  // before anything is written: C may be D
        for (std::int64_t s = 0; s < p.d.batch; ++s)
            for (std::uint64_t i = 0; i < p.d.rows; ++i)
                for (std::uint64_t j = 0; j < p.d.columns; ++j) {
                    double sum = 0;
                    for (std::uint64_t k = 0; k < inner; ++k)
                        sum += static_cast<double>(p.pa[place(p.a, p.how.transa, s, i, k)]) *
                               static_cast<double>(p.pb[place(p.b, p.how.transb, s, k, j)]);
                    sum *= static_cast<double>(p.alpha);
                    if (p.beta != 0)
                        sum += static_cast<double>(p.beta) * static_cast<double>(p.pc[place(p.c, lt::op_n, s, i, j)]);
                    made.push_back(finished(p, sum, i));
                }
        auto next = made.begin();
        for (std::int64_t s = 0; s < p.d.batch; ++s)
            for (std::uint64_t i = 0; i < p.d.rows; ++i)
                for (std::uint64_t j = 0; j < p.d.columns; ++j) p.pd[place(p.d, lt::op_n, s, i, j)] = *next++;
    }
    /// The epilogue: the bias has an element for each row.
    static float finished(const product& p, double x, std::uint64_t row) {
        if ((p.how.epilogue & lt::bias) != 0 && p.with_bias)
            x += static_cast<double>(static_cast<const float*>(p.how.bias)[row]);
        if ((p.how.epilogue & lt::relu) != 0) x = x > 0 ? x : 0;
        if ((p.how.epilogue & lt::gelu) != 0)
            x = 0.5 * x * (1 + std::tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
        return static_cast<float>(x);
    }
};

}  // namespace support
