// The kernel's own asynchronous I/O (io_submit), by plain system calls: libaio need not be
// installed.

#include "ssdtune/driver.h"

#if __has_include(<linux/aio_abi.h>)

#include <linux/aio_abi.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <vector>

namespace ssdtune {
namespace {

class AioDriver final : public Driver {
 public:
  AioDriver(aio_context_t context, unsigned queue_depth) : context_(context), events_(queue_depth) {
    blocks_.resize(queue_depth);
    waiting_.reserve(queue_depth);
    refused_.reserve(queue_depth);
  }
  ~AioDriver() override { syscall(SYS_io_destroy, context_); }

  int set_event(int event_fd) noexcept override {
    event_fd_ = event_fd;
    return 0;
  }

  void push(const Io& io) noexcept override {
    iocb& block = blocks_[io.tag];  // tags are slots, below the queue depth
    std::memset(&block, 0, sizeof block);
    block.aio_data = io.tag;
    block.aio_lio_opcode = io.write ? IOCB_CMD_PWRITE : IOCB_CMD_PREAD;
    block.aio_fildes = static_cast<std::uint32_t>(io.fd);
    block.aio_buf = reinterpret_cast<std::uintptr_t>(io.memory);
    block.aio_nbytes = io.length;
    block.aio_offset = io.offset;
    block.aio_flags = IOCB_FLAG_RESFD;
    block.aio_resfd = static_cast<std::uint32_t>(event_fd_);
    waiting_.push_back(&block);
  }

  bool flush() noexcept override {
    std::size_t first = 0;
    bool room = true;
    while (first < waiting_.size()) {
      const long taken =
          syscall(SYS_io_submit, context_, waiting_.size() - first, &waiting_[first]);
      if (taken > 0) {
        first += static_cast<std::size_t>(taken);
      } else if (taken == 0 || errno == EAGAIN) {
        room = false;
        break;
      } else if (errno != EINTR) {  // the error is of the first one only
        refused_.push_back({waiting_[first]->aio_data, -errno});
        ++first;
      }
    }
    waiting_.erase(waiting_.begin(), waiting_.begin() + static_cast<std::ptrdiff_t>(first));
    return room && refused_.empty();  // refused ones wait to be reaped: do not sleep long
  }

  std::size_t reap(std::span<Completion> completions) noexcept override {
    std::size_t count = 0;
    for (; count < refused_.size() && count < completions.size(); ++count) {
      completions[count] = refused_[count];
    }
    refused_.erase(refused_.begin(), refused_.begin() + static_cast<std::ptrdiff_t>(count));
    const std::size_t room = std::min(completions.size() - count, events_.size());
    timespec no_time{};
    const long got = syscall(SYS_io_getevents, context_, 0L, room, events_.data(), &no_time);
    for (long i = 0; i < got; ++i) {
      const io_event& event = events_[static_cast<std::size_t>(i)];
      completions[count++] = {event.data, event.res};
    }
    return count;
  }

 private:
  aio_context_t context_;
  int event_fd_ = -1;
  std::vector<iocb> blocks_;
  std::vector<iocb*> waiting_;
  std::vector<Completion> refused_;
  std::vector<io_event> events_;
};

}  // namespace

Result<std::unique_ptr<Driver>> make_aio_driver(unsigned queue_depth) {
  aio_context_t context = 0;
  if (syscall(SYS_io_setup, queue_depth, &context) != 0) return Error{errno, "io_setup"};
  return std::make_unique<AioDriver>(context, queue_depth);
}

}  // namespace ssdtune

#else

#include <cerrno>

namespace ssdtune {
Result<std::unique_ptr<Driver>> make_aio_driver(unsigned) {
  return Error{ENOSYS, "built without linux/aio_abi.h"};
}
}  // namespace ssdtune

#endif
