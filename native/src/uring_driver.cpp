// io_uring by plain system calls: liburing need not be installed.

#include "ssdtune/driver.h"

#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#endif

#ifdef IO_URING_OP_SUPPORTED  // headers of Linux 5.6 or newer
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <vector>

namespace ssdtune {
namespace {

// A shared mapping of the ring's memory.
class Mapping {
 public:
  Mapping(int fd, std::size_t size, std::uint64_t where)
      : size_(size),
        start_(mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd,
                    static_cast<off_t>(where))) {}
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() {
    if (valid()) munmap(start_, size_);
  }
  bool valid() const { return start_ != MAP_FAILED; }
  template <typename T>
  T* at(std::size_t offset) const {
    return reinterpret_cast<T*>(static_cast<std::byte*>(start_) + offset);
  }

 private:
  std::size_t size_;
  void* start_;
};

// The kernel reads and writes the other end of head and tail.
unsigned load(unsigned* place) { return std::atomic_ref(*place).load(std::memory_order_acquire); }
void store(unsigned* place, unsigned value) {
  std::atomic_ref(*place).store(value, std::memory_order_release);
}

int enter(int ring, unsigned to_submit, unsigned wanted, unsigned flags) {
  return static_cast<int>(syscall(__NR_io_uring_enter, ring, to_submit, wanted, flags, nullptr, 0));
}

class UringDriver final : public Driver {
 public:
  UringDriver(Descriptor ring, const io_uring_params& p)
      : ring_(std::move(ring)),
        sq_(ring_.get(), p.sq_off.array + p.sq_entries * sizeof(unsigned), IORING_OFF_SQ_RING),
        cq_(ring_.get(), p.cq_off.cqes + p.cq_entries * sizeof(io_uring_cqe), IORING_OFF_CQ_RING),
        sqes_(ring_.get(), p.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES),
        params_(p) {}

  bool mapped() const { return sq_.valid() && cq_.valid() && sqes_.valid(); }

  int set_event(int event_fd) noexcept override {
    const long rc =
        syscall(__NR_io_uring_register, ring_.get(), IORING_REGISTER_EVENTFD, &event_fd, 1);
    return rc == 0 ? 0 : errno;
  }

  void push(const Io& io) noexcept override {
    io_uring_sqe entry{};
    entry.opcode = io.write ? IORING_OP_WRITE : IORING_OP_READ;
    entry.fd = io.fd;
    entry.off = static_cast<std::uint64_t>(io.offset);
    entry.addr = reinterpret_cast<std::uintptr_t>(io.memory);
    entry.len = static_cast<std::uint32_t>(io.length);
    entry.user_data = io.tag;
    push(entry);
  }

  void push(const io_uring_sqe& entry) noexcept {
    unsigned* tail = sq_.at<unsigned>(params_.sq_off.tail);
    const unsigned index = *tail & *sq_.at<unsigned>(params_.sq_off.ring_mask);
    sqes_.at<io_uring_sqe>(0)[index] = entry;
    sq_.at<unsigned>(params_.sq_off.array)[index] = index;
    store(tail, *tail + 1);
    ++waiting_;
  }

  bool flush() noexcept override {
    while (waiting_ > 0) {
      const int taken = enter(ring_.get(), waiting_, 0, 0);
      if (taken > 0) {
        waiting_ -= static_cast<unsigned>(taken);
      } else if (taken == 0 || errno != EINTR) {
        return false;  // EAGAIN or EBUSY: no memory for requests, or completions to be reaped first
      }
    }
    return true;
  }

  std::size_t reap(std::span<Completion> completions) noexcept override {
    unsigned* head = cq_.at<unsigned>(params_.cq_off.head);
    const unsigned tail = load(cq_.at<unsigned>(params_.cq_off.tail));
    const unsigned mask = *cq_.at<unsigned>(params_.cq_off.ring_mask);
    const auto* entries = cq_.at<io_uring_cqe>(params_.cq_off.cqes);
    std::size_t count = 0;
    unsigned next = *head;
    for (; next != tail && count < completions.size(); ++next) {
      completions[count++] = {entries[next & mask].user_data, entries[next & mask].res};
    }
    store(head, next);
    return count;
  }

  // Sends one empty request around: a sandbox may allow the set-up and forbid the rest. Returns an
  // errno.
  int try_out() noexcept {
    io_uring_sqe entry{};
    entry.opcode = IORING_OP_NOP;
    push(entry);
    int rc = 0;
    do {
      rc = enter(ring_.get(), 1, 1, IORING_ENTER_GETEVENTS);
    } while (rc < 0 && errno == EINTR);
    if (rc < 0) return errno;
    waiting_ = 0;
    Completion completion{};
    return reap({&completion, 1}) == 1 ? 0 : EIO;
  }

 private:
  Descriptor ring_;
  Mapping sq_;
  Mapping cq_;
  Mapping sqes_;
  io_uring_params params_;
  unsigned waiting_ = 0;
};

// True if the kernel knows plain reads and writes (since 5.6).
bool knows_read_and_write(int ring) {
  std::vector<std::byte> memory(sizeof(io_uring_probe) + 256 * sizeof(io_uring_probe_op));
  auto* probe = reinterpret_cast<io_uring_probe*>(memory.data());
  if (syscall(__NR_io_uring_register, ring, IORING_REGISTER_PROBE, probe, 256) != 0) return false;
  const auto known = [&](unsigned op) {
    return op <= probe->last_op && (probe->ops[op].flags & IO_URING_OP_SUPPORTED) != 0;
  };
  return known(IORING_OP_READ) && known(IORING_OP_WRITE);
}

}  // namespace

Result<std::unique_ptr<Driver>> make_uring_driver(unsigned queue_depth) {
  io_uring_params params{};
  Descriptor ring(static_cast<int>(syscall(__NR_io_uring_setup, queue_depth, &params)));
  if (ring.get() < 0) return Error{errno, "io_uring_setup"};
  if (!knows_read_and_write(ring.get())) return Error{ENOSYS, "io_uring without read and write"};
  auto driver = std::make_unique<UringDriver>(std::move(ring), params);
  if (!driver->mapped()) return Error{ENOMEM, "mapping of the ring"};
  if (const int error = driver->try_out(); error != 0) return Error{error, "io_uring_enter"};
  return driver;
}

}  // namespace ssdtune

#else

#include <cerrno>

namespace ssdtune {
Result<std::unique_ptr<Driver>> make_uring_driver(unsigned) {
  return Error{ENOSYS, "built with kernel headers older than 5.6, io_uring"};
}
}  // namespace ssdtune

#endif
