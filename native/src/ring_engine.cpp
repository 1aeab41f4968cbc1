#include "ssdtune/ring_engine.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace ssdtune {

Descriptor::~Descriptor() {
  if (fd_ >= 0) ::close(fd_);
}

RingEngine::RingEngine(Options options, std::unique_ptr<Driver> driver)
    : Engine(std::move(options)),
      event_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      driver_(std::move(driver)),
      slots_(options_.queue_depth),
      completions_(options_.queue_depth) {
  int error = event_.get() < 0 ? errno : driver_->set_event(event_.get());
  if (error != 0) throw std::system_error(error, std::generic_category(), "eventfd");
  // Nothing is allocated once the thread runs: it must not fail halfway.
  fresh_.reserve(slots_.size());
  later_.reserve(slots_.size());
  failed_.reserve(2 * slots_.size());  // a failed one may fail again while the list is gone through
  for (std::uint64_t slot = slots_.size(); slot > 0; --slot) free_slots_.push_back(slot - 1);
  thread_ = std::thread([this] { run(); });
}

void RingEngine::close() {
  stop();
  if (thread_.joinable()) thread_.join();
}

void RingEngine::wake() {
  const std::uint64_t one = 1;
  // Only fails if the counter is at its limit, and then the thread is awake anyway.
  [[maybe_unused]] const ssize_t written = ::write(event_.get(), &one, sizeof one);
}

void RingEngine::run() {
  while (true) {
    bool stopping = false;
    {
      const std::lock_guard lock(mutex_);
      while (!free_slots_.empty() && !queue_.empty()) {
        const std::uint64_t slot = free_slots_.back();
        free_slots_.pop_back();
        queue_.take(slots_[slot]);
        fresh_.push_back(slot);
      }
      stopping = stopping_ && queue_.empty();
    }
    for (const std::uint64_t slot : fresh_) push(slot);
    fresh_.clear();
    if (stopping && free_slots_.size() == slots_.size()) return;
    const bool started = driver_->flush();
    if (failed_.empty()) pause(!started || !later_.empty());
    for (const std::uint64_t slot : later_) push(slot);
    later_.clear();
    const std::size_t num_failed = failed_.size();
    for (std::size_t i = 0; i < num_failed; ++i) digest(failed_[i]);
    failed_.erase(failed_.begin(), failed_.begin() + static_cast<std::ptrdiff_t>(num_failed));
    const std::size_t count = driver_->reap(completions_);
    for (std::size_t i = 0; i < count; ++i) digest(completions_[i]);
  }
}

void RingEngine::push(std::uint64_t slot) {
  const Request& request = slots_[slot];
  const Transfer& transfer = *request.transfer;
  const Attempt attempt = this->attempt(request);
  if (attempt.error != 0) {
    failed_.push_back({slot, -attempt.error});
    return;
  }
  driver_->push(
      {transfer.write, transfer.fd, request.offset(), request.memory(), attempt.length, slot});
}

void RingEngine::digest(const Completion& completion) {
  const std::uint64_t slot = completion.tag;
  switch (advance(slots_[slot], completion.result)) {
    case Next::again:
      push(slot);
      break;
    case Next::later:
      later_.push_back(slot);
      break;
    case Next::finished:
      const std::lock_guard lock(mutex_);
      finish(slots_[slot]);
      free_slots_.push_back(slot);
      break;
  }
}

void RingEngine::pause(bool briefly) {
  pollfd wanted{.fd = event_.get(), .events = POLLIN, .revents = 0};
  // An interrupted poll is as good as an event: the loop looks at everything each time.
  if (poll(&wanted, 1, briefly ? 1 : -1) == 1) {
    std::uint64_t counter = 0;
    [[maybe_unused]] const ssize_t got = ::read(event_.get(), &counter, sizeof counter);
  }
}

}  // namespace ssdtune
