// Linux native asynchronous I/O by its system calls, so that libaio need not be installed.
#include <linux/aio_abi.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "backend.h"

namespace aio {
namespace {

class LibaioBackend : public Backend {
public:
    explicit LibaioBackend(int depth) : blocks_(depth), events_(depth) {
        status_ = syscall(SYS_io_setup, depth, &context_) == 0 ? 0 : errno;
    }

    ~LibaioBackend() override {
        if (status_ == 0) syscall(SYS_io_destroy, context_);
    }

    int status() const { return status_; }

    void start(const Request& request) override {
        iocb& block = blocks_[request.slot];
        std::memset(&block, 0, sizeof block);
        block.aio_data = static_cast<uint64_t>(request.slot);
        block.aio_lio_opcode = request.is_write ? IOCB_CMD_PWRITE : IOCB_CMD_PREAD;
        block.aio_fildes = static_cast<uint32_t>(request.fd);
        block.aio_buf = reinterpret_cast<uint64_t>(request.buffer);
        block.aio_nbytes = request.bytes;
        block.aio_offset = request.offset;
        queued_.push_back(&block);
    }

    void submit() override {
        size_t begin = 0;
        while (begin < queued_.size()) {
            const long taken = syscall(SYS_io_submit, context_, queued_.size() - begin, queued_.data() + begin);
            if (taken > 0) {
                begin += taken;
                in_flight_ += taken;
            } else if (errno == EAGAIN) {
                // The kernel is short of requests. Take completions out, or give it a moment.
                if (in_flight_ == 0) usleep(1000);
                else collect(1, early_);
            } else if (errno != EINTR) {
                // Only the first block is at fault (a bad descriptor, say).
                early_.push_back({static_cast<int>(queued_[begin]->aio_data), -errno});
                ++begin;
            }
        }
        queued_.clear();
    }

    void wait(int at_least, std::vector<Completion>& done) override {
        submit();
        const int missing = at_least - static_cast<int>(early_.size());
        done.insert(done.end(), early_.begin(), early_.end());
        early_.clear();
        if (in_flight_ > 0) collect(missing > 0 ? missing : 0, done);
    }

private:
    void collect(long at_least, std::vector<Completion>& done) {
        if (at_least > in_flight_) at_least = in_flight_;
        long count = -1;
        while (count < 0) {
            count = syscall(SYS_io_getevents, context_, at_least, events_.size(), events_.data(), nullptr);
            if (count < 0 && errno != EINTR) count = 0;  // the context is ours and valid: nothing else can be reported
        }
        in_flight_ -= count;
        for (long i = 0; i < count; ++i) done.push_back({static_cast<int>(events_[i].data), events_[i].res});
    }

    aio_context_t context_ = 0;
    int status_ = 0;
    long in_flight_ = 0;
    std::vector<iocb> blocks_;  // by slot: the kernel keeps no copy until the request is submitted
    std::vector<io_event> events_;
    std::vector<iocb*> queued_;
    std::vector<Completion> early_;
};

}  // namespace

std::unique_ptr<Backend> make_libaio_backend(int depth, int* error) {
    auto backend = std::make_unique<LibaioBackend>(depth);
    *error = backend->status();
    if (*error != 0) return nullptr;
    return backend;
}

}  // namespace aio
