// SPDX-License-Identifier: Apache-2.0
// Makes an `upstream` of any memory resource: a type with all the members that an adaptor calls on
// the memory below it (concepts.hpp). For a plain resource, such as a std::pmr::memory_resource,
// the type adds the members that are missing. A resource that has them all is used by reference.
//
//   auto memory = gpushare::as_upstream(*std::pmr::new_delete_resource());
//   // null where allocate() would throw
//   gpushare::failure why;    void* p = memory.try_allocate(4096, 256, &why);
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <new>
#include <string_view>
#include <thread>
#include <type_traits>
#include <utility>

#include <gpushare/closing.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

namespace detail {
/// Whether a free with this answer has left the block allocated, so that a later free may succeed.
/// After any other answer the block isn't the caller's any more, and a resource that has a record
/// of the block drops the record: the block is back, or no later free of it succeeds either.
[[nodiscard]] constexpr bool stays_out(errc answer) noexcept {
    return answer != errc::none && answer != errc::unknown_block && answer != errc::wrong_size &&
           answer != errc::closed;
}
/// The owner of a request, for an upstream that tells requests apart.
struct asker {
    void* who = nullptr;
};
/// A resource that tells requests apart. A concept of its own because nvcc's front end rejects the
/// same requirement when a static_assert states it in place.
template <class R>
concept tells_askers = requires(R& r, std::size_t n, failure* why, asker by) {
    r.try_allocate(n, n, why, by);
};
}  // namespace detail

/// Why there was no memory, as far as it is known.
struct upstream_refusal {
    failure why{};                ///< with figures, where the resource has any
    std::exception_ptr thrown{};  ///< what a resource without try_allocate() threw
    bool final = false;           ///< the reason isn't a lack of memory, so asking again can't help
    detail::asker by{};           ///< for an upstream whose try_allocate() takes it
};

/// Refers to a plain resource, which must outlive it; copies refer to the same one. Thread-safe if
/// the resource is. Only the resource's allocate() and deallocate() are called. Sizes are charged
/// as multiples of the alignment; the resource never closes and has no owner.
template <memory_resource R>
class upstream_ref {
public:
    /// Refers to `of`.
    explicit upstream_ref(R& of) noexcept : resource_(&of) {}

    /// Throws what the resource throws.
    [[nodiscard]] void* allocate(std::size_t size, std::size_t alignment) const {
        return resource_->allocate(size, alignment);
    }
    /// Returns null where allocate() would throw; `why`, unless it is null, gets out_of_memory.
    [[nodiscard]] void* try_allocate(std::size_t size, std::size_t alignment, failure* why) const noexcept {
        upstream_refusal r;
        void* const p = ask(size, alignment, r);
        if (p == nullptr && why != nullptr) *why = {.code = errc::out_of_memory, .asked = size};
        return p;
    }
    /// Returns null where allocate() would throw. `r` then has the exception; `r.why` stays as it
    /// is.
    [[nodiscard]] void* ask(std::size_t size, std::size_t alignment, upstream_refusal& r) const noexcept {
        r.thrown = nullptr;
        try {
            return resource_->allocate(size, alignment);
        } catch (const std::bad_alloc&) {
            r.thrown = std::current_exception();
        } catch (...) {
            r.thrown = std::current_exception();
            r.final = true;
        }
        return nullptr;
    }
    /// errc::none, or the resource's answer if it gives one.
    errc deallocate(void* p, std::size_t size, std::size_t alignment) const noexcept {
        if constexpr (std::is_same_v<decltype(resource_->deallocate(p, size, alignment)), errc>) {
            return resource_->deallocate(p, size, alignment);
        } else {
            resource_->deallocate(p, size, alignment);
            return errc::none;
        }
    }
    /// The size rounded up to the alignment; bytes::max() where that would wrap.
    [[nodiscard]] static constexpr bytes charged(std::size_t size, std::size_t alignment) noexcept {
        const bytes padded = bytes{size} + bytes{alignment - 1};
        return padded == bytes::max() ? padded : bytes{padded.count() & ~(alignment - std::uint64_t{1})};
    }
    /// errc::none: a plain resource doesn't say what it can never grant.
    [[nodiscard]] static constexpr failure refuses(std::size_t /*size*/, std::size_t /*alignment*/) noexcept {
        return {};
    }
    /// bytes::max(): a plain resource doesn't say.
    [[nodiscard]] static constexpr bytes largest_free() noexcept { return bytes::max(); }
    /// Empty: a plain resource has no owner.
    [[nodiscard]] static constexpr std::string_view owner() noexcept { return {}; }
    /// An empty token: a plain resource never closes.
    [[nodiscard]] static close_token closing() noexcept { return {}; }
    /// False: a plain resource has no hooks.
    [[nodiscard]] static bool in_hook(std::thread::id) noexcept { return false; }

    /// The resource that it refers to.
    [[nodiscard]] R& resource() const noexcept { return *resource_; }

private:
    R* resource_;
};

/// Refers to a resource that models `upstream` already and must outlive it. Adds nothing to the
/// resource.
template <upstream R>
class upstream_ref<R> {
public:
    /// Refers to `of`.
    explicit upstream_ref(R& of) noexcept : resource_(&of) {}

    /// Calls the resource's allocate(); see concepts.hpp.
    [[nodiscard]] void* allocate(std::size_t size, std::size_t alignment) const {
        return resource_->allocate(size, alignment);
    }
    /// As the resource's.
    [[nodiscard]] void* try_allocate(std::size_t size, std::size_t alignment, failure* why) const noexcept {
        return resource_->try_allocate(size, alignment, why);
    }
    /// As try_allocate(), with the reason in `r`. `r.final` is true if the resource is closed.
    [[nodiscard]] void* ask(std::size_t size, std::size_t alignment, upstream_refusal& r) const noexcept {
        void* p = nullptr;
        if constexpr (detail::tells_askers<R>)
            p = resource_->try_allocate(size, alignment, &r.why, r.by);
        else
            p = resource_->try_allocate(size, alignment, &r.why);
        if (p == nullptr) r.final = r.why.code == errc::closed;
        return p;
    }
    /// As the resource's.
    errc deallocate(void* p, std::size_t size, std::size_t alignment) const noexcept {
        return resource_->deallocate(p, size, alignment);
    }
    /// As the resource's.
    [[nodiscard]] bytes charged(std::size_t size, std::size_t alignment) const noexcept {
        return std::as_const(*resource_).charged(size, alignment);
    }
    /// As the resource's.
    [[nodiscard]] failure refuses(std::size_t size, std::size_t alignment) const noexcept {
        return std::as_const(*resource_).refuses(size, alignment);
    }
    /// As the resource's.
    [[nodiscard]] bytes largest_free() const noexcept { return std::as_const(*resource_).largest_free(); }
    /// As the resource's.
    [[nodiscard]] std::string_view owner() const noexcept { return std::as_const(*resource_).owner(); }
    /// As the resource's.
    [[nodiscard]] close_token closing() const noexcept { return std::as_const(*resource_).closing(); }
    /// As quota::in_hook, if the resource tells; otherwise false.
    [[nodiscard]] bool in_hook(std::thread::id thread) const noexcept {
        if constexpr (requires(const R& r) { static_cast<bool>(r.in_hook(thread)); })
            return std::as_const(*resource_).in_hook(thread);
        else
            return false;
    }

    /// The resource that it refers to.
    [[nodiscard]] R& resource() const noexcept { return *resource_; }

private:
    R* resource_;
};

/// Makes an upstream of `of`, which must outlive it.
template <memory_resource R>
[[nodiscard]] upstream_ref<R> as_upstream(R& of) noexcept {
    return upstream_ref<R>(of);
}

namespace detail {
/// The least that an upstream can be made of, for concept checks.
struct plain_resource {
    void* allocate(std::size_t, std::size_t) { return nullptr; }
    void deallocate(void*, std::size_t, std::size_t) {}
};
}  // namespace detail
static_assert(upstream<upstream_ref<detail::plain_resource>>);
static_assert(upstream<upstream_ref<upstream_ref<detail::plain_resource>>>);

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
