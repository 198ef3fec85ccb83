// A thread that carries out pieces of operations, with up to `depth` requests in flight.
#pragma once

#include <condition_variable>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "backend.h"
#include "operation.h"

namespace aio {

struct Settings {
    int64_t block_bytes;
    int depth;
    bool single_submit;   // hand requests to the kernel one by one
    bool overlap_events;  // start further requests as soon as one is done, not when the whole batch is
    int max_open_jobs;    // with requests in flight at a time: each may have a file open, and descriptors are few
};

// What is left of a piece.
struct Job {
    std::shared_ptr<Operation> operation;
    char* memory;
    int64_t offset;
    int64_t bytes;
    bool is_aligned;
    int in_flight = 0;
};

class Worker {
public:
    Worker(const Settings& settings, std::unique_ptr<Backend> backend);
    ~Worker();  // ends when all jobs are done
    void add(Job job);

private:
    enum class Way { DIRECT, BOUNCED, BUFFERED };
    using JobList = std::list<Job>;
    struct Slot {
        JobList::iterator job;
        char* memory = nullptr;  // where the bytes belong
        int64_t offset = 0;
        int64_t bytes = 0;
        Way way = Way::BUFFERED;
        char* bounce = nullptr;  // aligned, as large as a block; made when first needed
    };

    void run();
    bool take_jobs();
    void fill();
    bool start_block(JobList::iterator job);
    void reap();
    void complete(Slot& slot, int64_t result);
    void finish_rest(Slot& slot, int64_t done_bytes);
    void retire(JobList::iterator job);
    char* bounce_of(Slot& slot);

    const Settings settings_;
    const int64_t direct_block_bytes_;  // block_bytes in whole pages
    std::unique_ptr<Backend> backend_;
    std::vector<Slot> slots_;
    std::vector<int> free_slots_;
    JobList jobs_;                  // with blocks still to start, or in flight
    JobList::iterator next_job_;    // the first with blocks still to start
    int open_jobs_ = 0;             // with requests in flight
    std::vector<Completion> done_;

    std::mutex mutex_;
    std::condition_variable has_jobs_;
    std::deque<Job> arrived_;
    bool is_ending_ = false;
    std::thread thread_;
};

}  // namespace aio
