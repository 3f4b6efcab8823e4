// SPDX-License-Identifier: Apache-2.0
// A type-erased upstream, so that a test can choose the order of a stack at run time, and resources
// compile once.
//
//   support::upstream_of erased{pool};      gpushare::scrubbing_resource<support::any_upstream, stream> over{erased, s};
#pragma once

#include <cstddef>
#include <string_view>
#include <thread>
#include <utility>

#include <gpushare/closing.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/as_upstream.hpp>
#include <gpushare/units.hpp>

namespace support {

class any_upstream {
public:
    any_upstream() = default;
    any_upstream(const any_upstream&) = delete;
    any_upstream& operator=(const any_upstream&) = delete;
    virtual ~any_upstream() = default;

    [[nodiscard]] void* allocate(std::size_t size, std::size_t alignment) {
        gpushare::failure why;
        if (void* const p = try_allocate(size, alignment, &why)) return p;
        throw gpushare::memory_error(why, owner(), "allocate");
    }
    [[nodiscard]] virtual void* try_allocate(std::size_t size, std::size_t alignment,
                                             gpushare::failure* why) noexcept = 0;
    virtual gpushare::errc deallocate(void* p, std::size_t size, std::size_t alignment) noexcept = 0;
    [[nodiscard]] virtual gpushare::bytes charged(std::size_t size, std::size_t alignment) const noexcept = 0;
    [[nodiscard]] virtual gpushare::failure refuses(std::size_t size, std::size_t alignment) const noexcept = 0;
    [[nodiscard]] virtual gpushare::bytes largest_free() const noexcept = 0;
    [[nodiscard]] virtual std::string_view owner() const noexcept = 0;
    [[nodiscard]] virtual gpushare::close_token closing() const noexcept = 0;
    [[nodiscard]] virtual bool in_hook(std::thread::id) const noexcept { return false; }
};
static_assert(gpushare::upstream<any_upstream>);

/// An upstream that also frees in stream order, with points of type `Point`.
template <class Point>
class ordered_upstream : public any_upstream {
public:
    virtual gpushare::errc deallocate_after(const Point& used, void* p, std::size_t size,
                                            std::size_t alignment) noexcept = 0;
    /// Collects frees that streams have reached.
    virtual void collect() noexcept = 0;
};

/// Refers to the resource, which must outlive it.
template <gpushare::upstream R, class Base = any_upstream>
class upstream_of : public Base {
public:
    explicit upstream_of(R& of) noexcept : to_(&of) {}

    [[nodiscard]] void* try_allocate(std::size_t size, std::size_t alignment,
                                     gpushare::failure* why) noexcept override {
        return to_->try_allocate(size, alignment, why);
    }
    gpushare::errc deallocate(void* p, std::size_t size, std::size_t alignment) noexcept override {
        return to_->deallocate(p, size, alignment);
    }
    [[nodiscard]] gpushare::bytes charged(std::size_t size, std::size_t alignment) const noexcept override {
        return std::as_const(*to_).charged(size, alignment);
    }
    [[nodiscard]] gpushare::failure refuses(std::size_t size, std::size_t alignment) const noexcept override {
        return std::as_const(*to_).refuses(size, alignment);
    }
    [[nodiscard]] gpushare::bytes largest_free() const noexcept override { return std::as_const(*to_).largest_free(); }
    [[nodiscard]] std::string_view owner() const noexcept override { return std::as_const(*to_).owner(); }
    [[nodiscard]] gpushare::close_token closing() const noexcept override { return std::as_const(*to_).closing(); }
    [[nodiscard]] bool in_hook(std::thread::id thread) const noexcept override {
        return gpushare::as_upstream(*to_).in_hook(thread);
    }

protected:
    R* to_;
};

/// Refers to a resource that frees in stream order.
template <gpushare::upstream R, class Point>
class ordered_upstream_of final : public upstream_of<R, ordered_upstream<Point>> {
public:
    using upstream_of<R, ordered_upstream<Point>>::upstream_of;

    gpushare::errc deallocate_after(const Point& used, void* p, std::size_t size,
                                    std::size_t alignment) noexcept override {
        return this->to_->deallocate_after(used, p, size, alignment);
    }
    void collect() noexcept override { this->to_->collect(); }
};

}  // namespace support
