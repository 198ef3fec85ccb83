#include "worker.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

namespace aio {
namespace {

int64_t round_up(int64_t bytes, int64_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

Worker::Worker(const Settings& settings, std::unique_ptr<Backend> backend)
    : settings_(settings), direct_block_bytes_(round_up(settings.block_bytes, AIO_ALIGNMENT)), backend_(std::move(backend)),
      slots_(settings.depth), next_job_(jobs_.end()) {
    for (int slot = settings.depth - 1; slot >= 0; --slot) free_slots_.push_back(slot);
    thread_ = std::thread([this] { run(); });
}

Worker::~Worker() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        is_ending_ = true;
    }
    has_jobs_.notify_one();
    thread_.join();
    for (Slot& slot : slots_) std::free(slot.bounce);
}

void Worker::add(Job job) {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        arrived_.push_back(std::move(job));
    }
    has_jobs_.notify_one();
}

void Worker::run() {
    while (take_jobs()) {
        fill();
        if (static_cast<int>(free_slots_.size()) < settings_.depth) reap();
    }
}

// Waits for work when there is none. Returns false when the worker is to end.
bool Worker::take_jobs() {
    std::unique_lock<std::mutex> lock(mutex_);
    if (jobs_.empty()) has_jobs_.wait(lock, [this] { return is_ending_ || !arrived_.empty(); });
    for (Job& job : arrived_) {
        const auto added = jobs_.insert(jobs_.end(), std::move(job));
        if (next_job_ == jobs_.end()) next_job_ = added;
    }
    arrived_.clear();
    return !jobs_.empty();
}

void Worker::fill() {
    const bool is_batch_open = static_cast<int>(free_slots_.size()) < settings_.depth;
    if (is_batch_open && !settings_.overlap_events) return;
    while (next_job_ != jobs_.end() && !free_slots_.empty()) {
        const auto job = next_job_;
        if (job->in_flight == 0 && open_jobs_ >= settings_.max_open_jobs) return;
        if (!start_block(job)) {
            ++next_job_;
            if (job->in_flight == 0) retire(job);
        } else if (settings_.single_submit) {
            backend_->submit();
        }
    }
}

// Starts the job's next block. Returns false when there is none left, or no use in it.
bool Worker::start_block(JobList::iterator job) {
    Operation& operation = *job->operation;
    if (job->bytes == 0 || !operation.prepare()) return false;
    const bool is_direct = job->is_aligned && operation.file.has_direct();
    const int fd = is_direct ? operation.file.direct() : operation.file.buffered();
    if (fd < 0) {
        operation.fail(-fd, AIO_OPENING, job->offset);
        return false;
    }
    Slot& slot = slots_[free_slots_.back()];
    slot.job = job;
    slot.memory = job->memory;
    slot.offset = job->offset;
    slot.bytes = std::min(job->bytes, is_direct ? direct_block_bytes_ : settings_.block_bytes);
    const bool is_memory_aligned = reinterpret_cast<uintptr_t>(slot.memory) % operation.file.memory_alignment() == 0;
    slot.way = !is_direct ? Way::BUFFERED : is_memory_aligned ? Way::DIRECT : Way::BOUNCED;
    char* buffer = slot.memory;
    if (slot.way == Way::BOUNCED) {
        buffer = bounce_of(slot);
        if (buffer == nullptr) {
            operation.fail(ENOMEM, AIO_MOVING, slot.offset);
            return false;
        }
        if (operation.is_write) std::memcpy(buffer, slot.memory, slot.bytes);
    }
    backend_->start({free_slots_.back(), operation.is_write, fd, buffer, static_cast<size_t>(slot.bytes), slot.offset});
    free_slots_.pop_back();
    job->memory += slot.bytes;
    job->offset += slot.bytes;
    job->bytes -= slot.bytes;
    if (++job->in_flight == 1) ++open_jobs_;
    return true;
}

char* Worker::bounce_of(Slot& slot) {
    if (slot.bounce == nullptr)
        slot.bounce = static_cast<char*>(std::aligned_alloc(AIO_ALIGNMENT, direct_block_bytes_));
    return slot.bounce;
}

void Worker::reap() {
    const int in_flight = settings_.depth - static_cast<int>(free_slots_.size());
    done_.clear();
    backend_->wait(settings_.overlap_events ? 1 : in_flight, done_);
    for (const Completion& completion : done_) {
        Slot& slot = slots_[completion.slot];
        complete(slot, completion.result);
        free_slots_.push_back(completion.slot);
        const auto job = slot.job;
        if (--job->in_flight > 0) continue;
        --open_jobs_;
        const bool is_next = job == next_job_;
        if (job->bytes > 0 && !job->operation->has_failed()) continue;
        if (is_next) ++next_job_;
        retire(job);
    }
}

void Worker::retire(JobList::iterator job) {
    job->operation->piece_done();
    jobs_.erase(job);
}

void Worker::complete(Slot& slot, int64_t result) {
    Operation& operation = *slot.job->operation;
    // EINVAL: the file system wants more of a direct request than it says, or has no asynchronous I/O. Plain calls decide.
    const bool goes_on = result == -EINTR || result == -EAGAIN || result == -EINVAL;
    if (result < 0 && !goes_on) {
        operation.fail(static_cast<int>(-result), AIO_MOVING, slot.offset);
        return;
    }
    const int64_t moved = std::max<int64_t>(0, result);
    if (slot.way == Way::BOUNCED && !operation.is_write) std::memcpy(slot.memory, slot.bounce, moved);
    auto& counter = slot.way == Way::DIRECT    ? operation.direct_bytes
                    : slot.way == Way::BOUNCED ? operation.bounced_bytes
                                               : operation.buffered_bytes;
    counter += moved;
    if (moved < slot.bytes) finish_rest(slot, moved);
}

// Moves what the kernel left of a request, through the page cache and at once: it is rare, and tells why it was short.
void Worker::finish_rest(Slot& slot, int64_t done_bytes) {
    Operation& operation = *slot.job->operation;
    const int fd = operation.file.buffered();
    if (fd < 0) return operation.fail(-fd, AIO_OPENING, slot.offset);
    while (done_bytes < slot.bytes) {
        char* memory = slot.memory + done_bytes;
        const int64_t offset = slot.offset + done_bytes;
        const size_t left = static_cast<size_t>(slot.bytes - done_bytes);
        const ssize_t moved = operation.is_write ? pwrite(fd, memory, left, offset) : pread(fd, memory, left, offset);
        if (moved < 0 && errno == EINTR) continue;
        if (moved < 0) return operation.fail(errno, AIO_MOVING, offset);
        if (moved == 0 && operation.is_write) return operation.fail(EIO, AIO_MOVING, offset);
        if (moved == 0) return operation.fail_at_end_of_file(offset);
        done_bytes += moved;
        operation.buffered_bytes += moved;
    }
}

}  // namespace aio
