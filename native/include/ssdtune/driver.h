// What io_uring and the kernel's aio have in common: requests go in, completions come out in any
// order.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "ssdtune/engine.h"

namespace ssdtune {

// A file descriptor that closes itself.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor();
  int get() const { return fd_; }

 private:
  int fd_ = -1;
};

struct Io {
  bool write;
  int fd;
  std::int64_t offset;
  std::byte* memory;
  std::size_t length;
  std::uint64_t tag;  // comes back with the completion
};

struct Completion {
  std::uint64_t tag;
  std::int64_t result;  // bytes moved, or a negative errno
};

// Used by one thread at a time. Never more I/Os inside than the queue depth it was made for.
class Driver {
 public:
  virtual ~Driver() = default;

  // Tells the driver which eventfd to signal when there are completions. Returns 0 or an errno.
  virtual int set_event(int event_fd) noexcept = 0;
  // Takes an I/O; it starts at the next flush.
  virtual void push(const Io& io) noexcept = 0;
  // Starts what was pushed. False if the kernel has no room just now: call again.
  virtual bool flush() noexcept = 0;
  // Collects completions without waiting; returns their number.
  virtual std::size_t reap(std::span<Completion> completions) noexcept = 0;
};

Result<std::unique_ptr<Driver>> make_uring_driver(unsigned queue_depth);
Result<std::unique_ptr<Driver>> make_aio_driver(unsigned queue_depth);

}  // namespace ssdtune
