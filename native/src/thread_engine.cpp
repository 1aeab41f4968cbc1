#include "ssdtune/thread_engine.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>

namespace ssdtune {

ThreadEngine::ThreadEngine(Options options) : Engine(std::move(options)) {
  const unsigned num_threads = std::clamp(options_.queue_depth, 1U, kMaxThreads);
  threads_.reserve(num_threads);
  try {
    for (unsigned i = 0; i < num_threads; ++i) threads_.emplace_back([this] { run(); });
  } catch (...) {
    close();  // the threads there are would outlive a half-made engine
    throw;
  }
}

void ThreadEngine::close() {
  stop();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

void ThreadEngine::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    work_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    Request request;
    queue_.take(request);
    lock.unlock();
    move(request);
    lock.lock();
    finish(request);
  }
}

void ThreadEngine::move(Request& request) const {
  Next next = Next::again;
  while (next != Next::finished) {
    if (next == Next::later) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const Attempt attempt = this->attempt(request);
    ssize_t result = -attempt.error;
    if (attempt.error == 0) {
      const int fd = request.transfer->fd;
      result = request.transfer->write
                   ? pwrite(fd, request.memory(), attempt.length, request.offset())
                   : pread(fd, request.memory(), attempt.length, request.offset());
      if (result < 0) result = -errno;
    }
    next = advance(request, result);
  }
}

}  // namespace ssdtune
