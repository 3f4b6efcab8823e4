// SPDX-License-Identifier: Apache-2.0
// A file of tenants' usage, to write bills from. Lines are only ever added. A process that is
// killed loses at most the line that it was writing. A file that has become large is put aside
// under a number.
//
//   gpushare::usage_journal journal{"/var/lib/server/usage"};
//   journal.append(lines);                                                      // from usage_meter::read
//   auto torn = gpushare::usage_journal::read("/var/lib/server/usage", [&](const gpushare::usage_line& l) { bill.add(l); });
//
// Others may rotate the file, too: each append checks whether the path still is this file (inode)
// and how long it is. If the file was renamed or removed, a new one is begun; if it was truncated,
// it goes on from there. A tool that copies and truncates loses the lines that come in between the
// two: let it rename. A limit of a file's size (SIGXFSZ) is an error like a full disk.
//
// usage_line.hpp says what a line contains, and how bills are made of lines. POSIX.
#pragma once

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <ctime>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <gpushare/config.hpp>
#include <gpushare/detail/parse.hpp>
#include <gpushare/error.hpp>
#include <gpushare/serving/usage_line.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Options of a usage_journal.
struct journal_options {
    bytes rotate_at{std::uint64_t{64} << 20};  ///< a file that would be larger is put aside first
    bool sync =
        false;  ///< each append waits until the disk has it: it then survives a power cut, not only a killed process
};

namespace detail {

/// Keeps a limit of a file's size from ending the process while this lives: the call that meets it
/// fails with EFBIG, as if the signal were ignored. Affects the calling thread only; a signal that
/// was pending before stays.
class no_file_size_signal {
public:
    no_file_size_signal() noexcept {
        sigset_t pending;
        ::sigemptyset(&this_one_);
        ::sigaddset(&this_one_, SIGXFSZ);
        pending_before_ = ::sigpending(&pending) == 0 && ::sigismember(&pending, SIGXFSZ) == 1;
        blocked_ = ::pthread_sigmask(SIG_BLOCK, &this_one_, &before_) == 0;
    }
    no_file_size_signal(const no_file_size_signal&) = delete;
    no_file_size_signal& operator=(const no_file_size_signal&) = delete;
    ~no_file_size_signal() {
        if (!blocked_) return;
        const int error = errno;
        const timespec at_once{};
        // The kernel sends it to the thread that writes: it is here by now, and nobody else's.
        if (!pending_before_)
            while (::sigtimedwait(&this_one_, nullptr, &at_once) < 0 && errno == EINTR) {
            }
        (void)::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
        errno = error;
    }

private:
    sigset_t this_one_{}, before_{};
    bool blocked_ = false, pending_before_ = false;
};

}  // namespace detail

/// The file that lines are added to. Movable, one owner; for one thread at a time. A second journal
/// of the same file, of another process too, is refused.
class usage_journal {
public:
    /// Opens or makes `path`; the files put aside are `path`.1, `path`.2 and so on, from the
    /// oldest. A partial line of a killed process stays there, marked as torn. Throws
    /// operation_error: io_failed with errno in `asked`, in_flight if another journal has it.
    explicit usage_journal(std::string path, journal_options o = {}) : path_(std::move(path)), options_(o) {
        if (const failure why = open(); why.code != errc::none) raise(why, {}, "opening a usage journal");
    }
    /// Takes over the file.
    usage_journal(usage_journal&& other) noexcept
        : path_(std::move(other.path_)),
          options_(other.options_),
          file_(std::exchange(other.file_, -1)),
          size_(other.size_),
          torn_(other.torn_),
          half_written_(other.half_written_) {}
    usage_journal& operator=(usage_journal&&) = delete;
    ~usage_journal() { close(); }

    /// Adds lines: all, or none of them counts. A failed call may be repeated. If the disk fails
    /// and a half-written batch can't be taken back at once, it is taken back before anything more
    /// is added: whole lines of it count only if this process ends first. io_failed with errno in
    /// `asked`; invalid_specification for an invalid line; out_of_memory, of the host's.
    failure try_append(std::span<const usage_line> lines) noexcept try {
        std::string text;
        for (const auto& l : lines) {
            if (!takes(l)) return {.code = errc::invalid_specification, .because = reason::bad_usage_line};
            text += to_text(l);
        }
        if (text.empty()) return {};
        if (const failure why = find_file(); why.code != errc::none) return why;
        if (size_ != 0 && size_ + text.size() > options_.rotate_at.count())
            if (const failure why = rotate(); why.code != errc::none) return why;
        return write(text);
    } catch (const error& e) {
        return e.figures();
    } catch (...) {
        return detail::no_host_memory;
    }
    /// Whether a line can be written: it has a name and a length, and didn't use less than nothing.
    [[nodiscard]] static bool takes(const usage_line& l) noexcept {
        return !l.tenant.empty() && l.from < l.until && l.amounts.device_time >= ns{};
    }
    /// Adds those of the lines that it takes, and leaves the others in `waiting`: one of these
    /// doesn't keep the rest from being billed. All stay there where the file can't be written. As
    /// try_append, but invalid_specification says that some are left.
    failure append_from(std::vector<usage_line>& waiting) noexcept try {
        const auto bad = std::stable_partition(waiting.begin(), waiting.end(), takes);
        const auto good = static_cast<std::size_t>(bad - waiting.begin());
        if (const failure why = try_append(std::span(waiting).first(good)); why.code != errc::none) return why;
        waiting.erase(waiting.begin(), bad);
        if (waiting.empty()) return {};
        return {.code = errc::invalid_specification, .because = reason::bad_usage_line};
    } catch (...) {
        return detail::no_host_memory;
    }
    /// Throws what try_append() returns.
    void append(std::span<const usage_line> lines) {
        if (const failure why = try_append(lines); why.code != errc::none)
            raise(why, {}, "appending to a usage journal");
    }

    /// Puts the file aside and begins a new one. The figures as of try_append.
    failure rotate() noexcept try {
        if (file_ < 0) return open();  // an earlier call put it aside, and found no room for the new one
        if (const failure why = take_back(); why.code != errc::none) return why;
        if (is_at_path()) {
            const auto aside = numbers_aside(path_);
            const auto next = path_ + '.' + std::to_string(aside.empty() ? 1 : aside.back() + 1);
            // ENOENT: somebody else has put it aside.
            if (std::rename(path_.c_str(), next.c_str()) != 0 && errno != ENOENT) return failed();
        }
        close();
        return open();
    } catch (const error& e) {
        return e.figures();
    } catch (...) {
        return detail::no_host_memory;
    }

    /// Calls `each(line)` for each line, the oldest first, of the files put aside as well. Returns
    /// how many were torn. Also while a journal writes. Throws operation_error (io_failed),
    /// std::bad_alloc, and what `each` throws.
    template <class F>
    static std::size_t read(const std::string& path, F each) {
        const file current(path);  // opened first: if it is put aside meanwhile, it isn't read twice
        std::size_t torn = 0;
        for (const auto n : numbers_aside(path)) {
            const file aside(path + '.' + std::to_string(n));
            if (aside.id() != current.id()) torn += read_lines(aside, each);
        }
        return torn + read_lines(current, each);
    }

private:
    [[nodiscard]] static failure failed() noexcept {
        return {.code = errc::io_failed, .asked = static_cast<std::uint64_t>(errno)};
    }

    failure open() noexcept {
        const failure why = [this]() -> failure {
            file_ = ::open(path_.c_str(), O_RDWR | O_APPEND | O_CREAT | O_CLOEXEC, 0640);
            if (file_ < 0) return failed();
            if (::flock(file_, LOCK_EX | LOCK_NB) != 0)
                return errno == EWOULDBLOCK ? failure{errc::in_flight} : failed();
            if (const failure unseen = look_at_end(); unseen.code != errc::none) return unseen;
            return options_.sync ? sync_folder() : failure{};
        }();
        if (why.code != errc::none) close();
        return why;
    }
    void close() noexcept {
        if (file_ >= 0) (void)::close(std::exchange(file_, -1));
        size_ = 0;
        torn_ = half_written_ = false;
    }
    // How long the file is now, and whether its last line is whole: others may have truncated it.
    [[nodiscard]] failure look_at_end() noexcept {
        struct stat now {};
        if (::fstat(file_, &now) != 0) return failed();
        size_ = static_cast<std::uint64_t>(now.st_size);
        char last = '\n';
        if (size_ != 0 && ::pread(file_, &last, 1, now.st_size - 1) != 1) return failed();
        torn_ = last != '\n';
        return {};
    }
    // Whether who opens the path finds the file that is open here.
    [[nodiscard]] bool is_at_path() const noexcept {
        struct stat open {
        }, there{};
        return ::fstat(file_, &open) == 0 && ::stat(path_.c_str(), &there) == 0 && open.st_ino == there.st_ino &&
               open.st_dev == there.st_dev;
    }
    [[nodiscard]] bool is_removed() const noexcept {
        struct stat open {};
        return ::fstat(file_, &open) == 0 && open.st_nlink == 0;
    }
    // Opens the file that is at the path by now, and finds its end. First takes back the
    // half-written lines in the old one.
    [[nodiscard]] failure find_file() noexcept {
        if (file_ < 0) return open();
        if (const failure why = take_back(); why.code != errc::none) return why;
        if (is_at_path()) return look_at_end();
        close();
        return open();
    }
    // A new file's name, and that of one put aside, survive a power cut as well.
    [[nodiscard]] failure sync_folder() const noexcept try {
        const int folder = ::open(folder_of(path_).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (folder < 0) return failed();
        const failure why = ::fsync(folder) != 0 ? failed() : failure{};
        (void)::close(folder);
        return why;
    } catch (...) {
        return detail::no_host_memory;
    }

    // Again, where the file was removed meanwhile: nobody could read it there.
    failure write(const std::string& lines) {
        for (int turn = 0; turn < 8; ++turn) {
            if (const failure why = write_here(lines); why.code != errc::none) return why;
            if (!is_removed()) return {};
            close();
            if (const failure why = open(); why.code != errc::none) return why;
        }
        return {.code = errc::io_failed, .asked = ENOENT};
    }
    // With one call of the system's, so that what others read is whole lines but where that call fails half way.
    failure write_here(const std::string& lines) {
        const detail::no_file_size_signal quiet;
        // Without the mark, what is torn might be a whole line but for its end, and would count from now on.
        const std::string text = torn_ ? "~\n" + lines : lines;
        for (std::size_t done = 0; done < text.size();) {
            const auto n = ::write(file_, text.data() + done, text.size() - done);
            if (n < 0 && errno == EINTR) continue;
            if (n <= 0) return undo(failed());
            half_written_ = true;
            done += static_cast<std::size_t>(n);
        }
        if (options_.sync && ::fdatasync(file_) != 0) return undo(failed());
        size_ += text.size();
        torn_ = half_written_ = false;
        return {};
    }
    // The lines of an append that failed must not count: whoever tries again would add them twice.
    failure undo(failure why) noexcept {
        (void)take_back();
        return why;
    }
    failure take_back() noexcept {
        if (!half_written_) return {};
        // Where others have made it shorter meanwhile, to cut it would make it longer: zeros that
        // the next line would be a part of.
        struct stat now {};
        if (::fstat(file_, &now) != 0) return failed();
        if (static_cast<std::uint64_t>(now.st_size) > size_ && ::ftruncate(file_, static_cast<off_t>(size_)) != 0)
            return failed();
        half_written_ = false;
        return {};
    }

    [[nodiscard]] static std::string folder_of(const std::string& path) {
        const auto slash = path.rfind('/');
        return slash == std::string::npos ? "." : path.substr(0, slash + 1);
    }
    [[nodiscard]] static std::vector<std::uint64_t> numbers_aside(const std::string& path) {
        const auto slash = path.rfind('/');
        const auto name = (slash == std::string::npos ? path : path.substr(slash + 1)) + '.';
        std::vector<std::uint64_t> all;
        DIR* const at = ::opendir(folder_of(path).c_str());
        if (at == nullptr) raise(failed(), {}, "looking for usage journals");
        while (const dirent* const entry = ::readdir(at)) {
            const std::string_view found = entry->d_name;
            if (!found.starts_with(name)) continue;
            const auto number = found.substr(name.size());
            const auto n = detail::parse_whole(number);
            // A copy of somebody's, "usage.01", is none of ours: its lines would count twice.
            if (n.code == detail::parse_code::ok && std::to_string(n.value) == number) all.push_back(n.value);
        }
        (void)::closedir(at);
        std::sort(all.begin(), all.end());
        return all;
    }

    // For reading; nothing where there is none.
    class file {
    public:
        explicit file(const std::string& path) : at_(std::fopen(path.c_str(), "rbe")) {
            struct stat now {};
            if (at_ != nullptr && ::fstat(::fileno(at_), &now) == 0) id_ = now.st_ino;
            if (at_ == nullptr && errno != ENOENT) raise(failed(), {}, "reading a usage journal");
        }
        file(const file&) = delete;
        file& operator=(const file&) = delete;
        ~file() {
            if (at_ != nullptr) (void)std::fclose(at_);
        }
        [[nodiscard]] ino_t id() const noexcept { return id_; }
        [[nodiscard]] std::size_t read(std::span<char> to) const {
            if (at_ == nullptr) return 0;
            const auto n = std::fread(to.data(), 1, to.size(), at_);
            if (std::ferror(at_) != 0) raise(failed(), {}, "reading a usage journal");
            return n;
        }

    private:
        std::FILE* at_;
        ino_t id_ = 0;
    };

    // In pieces: a journal may be larger than memory.
    template <class F>
    static std::size_t read_lines(const file& from, F& each) {
        std::size_t torn = 0;
        std::string text;
        std::vector<char> piece(std::size_t{1} << 16);
        while (const auto n = from.read(piece)) {
            text.append(piece.data(), n);
            const auto end = text.rfind('\n');
            if (end == std::string::npos) continue;
            torn += read_usage(std::string_view(text).substr(0, end + 1), std::ref(each));
            text.erase(0, end + 1);
        }
        return torn + (text.empty() ? 0 : 1);
    }

    std::string path_;
    journal_options options_;
    int file_ = -1;
    std::uint64_t size_ = 0;
    bool torn_ = false;          // it doesn't end with a line feed
    bool half_written_ = false;  // behind size_ there is what doesn't count
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
