// Transfers and the requests they are cut into: what to do after each completion. No system calls
// here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>

namespace ssdtune {

// Direct I/O starts and ends at multiples of this; the Python side checks it before submitting.
inline constexpr std::size_t kAlignment = 4096;

// How often EAGAIN is tried again, a millisecond apart, before it counts as an error.
inline constexpr int kBusyRetries = 1000;

// What became of a transfer: `moved` bytes without a gap from its start, and an errno or 0. Fewer
// bytes than wanted without an error: the file ended there.
struct Outcome {
  int error = 0;
  std::size_t moved = 0;
};

// Bytes between a file and memory. The caller keeps both alive until the transfer is finished. The
// engine's mutex guards every field below `memory`.
struct Transfer {
  Transfer(bool write_, int fd_, bool direct_, std::int64_t offset_, std::span<std::byte> memory_)
      : write(write_), direct(direct_), fd(fd_), offset(offset_), memory(memory_) {
    outcome.moved = memory.size();
  }

  const bool write;
  const bool direct;
  const int fd;
  const std::int64_t offset;
  const std::span<std::byte> memory;

  std::size_t issued = 0;    // bytes handed out as requests
  std::size_t requests = 0;  // requests in flight
  bool finished = false;
  Outcome outcome;
};

// A piece of a transfer that one thread or one slot of a ring works on.
struct Request {
  std::shared_ptr<Transfer> transfer;
  std::size_t position = 0;  // where the next system call starts; aligned on a direct file
  std::size_t reached = 0;   // bytes before this are moved
  std::size_t end = 0;
  int error = 0;
  int busy = 0;

  std::byte* memory() const { return transfer->memory.data() + position; }
  std::int64_t offset() const { return transfer->offset + static_cast<std::int64_t>(position); }
  std::size_t length() const { return end - position; }
};

enum class Next { finished, again, later };

// Digests the result of one system call: bytes moved, or a negative errno.
Next advance(Request& request, std::int64_t result);

// The transfers that still have requests to hand out. Not thread-safe: the engine locks.
class TransferQueue {
 public:
  explicit TransferQueue(std::size_t request_bytes) : request_bytes_(request_bytes) {}

  bool empty() const { return active_.empty(); }
  void push(std::shared_ptr<Transfer> transfer) { active_.push_back(std::move(transfer)); }

  // Fills `request` with the next piece. Transfers take turns, so that a read does not wait for a
  // long write.
  void take(Request& request);

  // Accounts for a finished request and forgets it; true if its whole transfer is finished with it.
  bool finish(Request& request);

 private:
  std::size_t request_bytes_;
  std::deque<std::shared_ptr<Transfer>> active_;
};

}  // namespace ssdtune
