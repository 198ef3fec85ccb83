// io_uring, through liburing. Without HAVE_LIBURING there is only the answer that it is not built in.
#include <cerrno>

#include "backend.h"

#ifndef HAVE_LIBURING

namespace aio {

std::unique_ptr<Backend> make_uring_backend(int, int* error) {
    *error = ENOSYS;
    return nullptr;
}

}  // namespace aio

#else

#include <liburing.h>

namespace aio {
namespace {

class UringBackend : public Backend {
public:
    explicit UringBackend(int depth) { status_ = io_uring_queue_init(depth, &ring_, IORING_SETUP_CLAMP); }

    ~UringBackend() override {
        if (status_ == 0) io_uring_queue_exit(&ring_);
    }

    int status() const { return status_; }

    void start(const Request& request) override {
        // CLAMP may have made the ring smaller than the depth: then make room first.
        io_uring_sqe* entry = io_uring_get_sqe(&ring_);
        while (entry == nullptr && broken_ == 0) {
            submit();
            entry = io_uring_get_sqe(&ring_);
        }
        if (entry == nullptr) {
            refused_.push_back({request.slot, broken_});
            return;
        }
        const auto prepare = request.is_write ? prepare_write : prepare_read;
        prepare(entry, request);
        io_uring_sqe_set_data64(entry, static_cast<uint64_t>(request.slot));
        queued_.push_back(request.slot);
    }

    void submit() override { submit_and_wait(0); }

    void wait(int at_least, std::vector<Completion>& done) override {
        const size_t before = done.size();
        const auto count = [&] { return static_cast<int>(done.size() - before); };
        do {
            submit_and_wait(at_least > count() + static_cast<int>(refused_.size()) && in_flight_ + queued_.size() > 0 ? 1 : 0);
            done.insert(done.end(), refused_.begin(), refused_.end());
            refused_.clear();
            collect(done);
        } while (count() < at_least && in_flight_ > 0);
    }

private:
    static void prepare_read(io_uring_sqe* entry, const Request& r) {
        io_uring_prep_read(entry, r.fd, r.buffer, static_cast<unsigned>(r.bytes), static_cast<uint64_t>(r.offset));
    }
    static void prepare_write(io_uring_sqe* entry, const Request& r) {
        io_uring_prep_write(entry, r.fd, r.buffer, static_cast<unsigned>(r.bytes), static_cast<uint64_t>(r.offset));
    }

    void submit_and_wait(unsigned at_least) {
        while (broken_ == 0 && (!queued_.empty() || at_least > 0)) {
            const int taken = io_uring_submit_and_wait(&ring_, at_least);
            if (taken >= 0) {
                in_flight_ += taken;
                queued_.erase(queued_.begin(), queued_.begin() + taken);
                if (queued_.empty()) return;
                continue;
            }
            if (taken == -EINTR) continue;
            // EAGAIN and EBUSY: the kernel is short of memory or of room for completions. Take some out and try again.
            if (taken == -EAGAIN || taken == -EBUSY) {
                collect(refused_);
                if (!refused_.empty()) at_least = 0;
                continue;
            }
            broken_ = taken;
            for (int slot : queued_) refused_.push_back({slot, broken_});
            queued_.clear();
        }
    }

    void collect(std::vector<Completion>& done) {
        io_uring_cqe* entry = nullptr;
        while (io_uring_peek_cqe(&ring_, &entry) == 0) {
            done.push_back({static_cast<int>(io_uring_cqe_get_data64(entry)), entry->res});
            io_uring_cqe_seen(&ring_, entry);
            --in_flight_;
        }
    }

    io_uring ring_{};
    int status_ = 0;
    int broken_ = 0;  // -errno after which the ring is not used any more
    size_t in_flight_ = 0;
    std::vector<int> queued_;
    std::vector<Completion> refused_;  // and, when the ring was full, completions taken out early
};

}  // namespace

std::unique_ptr<Backend> make_uring_backend(int depth, int* error) {
    auto backend = std::make_unique<UringBackend>(depth);
    *error = -backend->status();
    if (*error != 0) return nullptr;
    return backend;
}

}  // namespace aio

#endif
