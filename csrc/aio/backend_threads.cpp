// pread and pwrite on threads, for kernels that offer nothing better.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

#include "backend.h"

namespace aio {
namespace {

// More threads than this do not make a disk faster, but cost memory and switches.
constexpr int MAX_THREADS = 16;

class ThreadBackend : public Backend {
public:
    explicit ThreadBackend(int depth) {
        try {
            for (int i = 0; i < std::min(depth, MAX_THREADS); ++i) threads_.emplace_back([this] { serve(); });
        } catch (const std::system_error&) {
            if (threads_.empty()) throw;  // with fewer threads than asked for it still works
        }
    }

    ~ThreadBackend() override {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            is_ending_ = true;
        }
        has_work_.notify_all();
        for (auto& thread : threads_) thread.join();
    }

    void start(const Request& request) override { queued_.push_back(request); }

    void submit() override {
        if (queued_.empty()) return;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            waiting_.insert(waiting_.end(), queued_.begin(), queued_.end());
        }
        queued_.size() == 1 ? has_work_.notify_one() : has_work_.notify_all();
        queued_.clear();
    }

    void wait(int at_least, std::vector<Completion>& done) override {
        submit();
        std::unique_lock<std::mutex> lock(mutex_);
        has_result_.wait(lock, [&] { return static_cast<int>(finished_.size()) >= at_least; });
        done.insert(done.end(), finished_.begin(), finished_.end());
        finished_.clear();
    }

private:
    void serve() {
        std::unique_lock<std::mutex> lock(mutex_);
        while (true) {
            has_work_.wait(lock, [this] { return is_ending_ || !waiting_.empty(); });
            if (waiting_.empty()) return;
            const Request request = waiting_.front();
            waiting_.pop_front();
            lock.unlock();
            const ssize_t moved = request.is_write ? pwrite(request.fd, request.buffer, request.bytes, request.offset)
                                                   : pread(request.fd, request.buffer, request.bytes, request.offset);
            const int64_t result = moved < 0 ? -errno : moved;
            lock.lock();
            finished_.push_back({request.slot, result});
            has_result_.notify_one();
        }
    }

    std::vector<Request> queued_;
    std::mutex mutex_;
    std::condition_variable has_work_, has_result_;
    std::deque<Request> waiting_;
    std::vector<Completion> finished_;
    bool is_ending_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<Backend> make_thread_backend(int depth, int* error) {
    try {
        *error = 0;
        return std::make_unique<ThreadBackend>(depth);
    } catch (const std::system_error& failure) {
        *error = failure.code().value();
        return nullptr;
    }
}

}  // namespace aio
