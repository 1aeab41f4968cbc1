// Engines: they move transfers with threads of their own. Read transfer.h first, driver.h for the
// rings.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <variant>

#include "ssdtune/transfer.h"

namespace ssdtune {

// Why something cannot be had: an errno and what was tried.
struct Error {
  int number = 0;
  std::string what;
};

template <typename T>
using Result = std::variant<T, Error>;

// For tests: sees each system call before it is made, may shorten it or fail it with an errno.
// Called from engine threads, possibly several at once.
struct Attempt {
  std::size_t length = 0;
  int error = 0;
};
using Fault = std::function<Attempt(bool write, std::int64_t offset, std::size_t length)>;

struct Options {
  unsigned queue_depth = 16;
  std::size_t request_bytes = std::size_t{1} << 20;
  Fault fault;
};

class Engine {
 public:
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  virtual ~Engine() = default;

  // Starts a transfer of at least one byte; null if the engine was closed.
  std::shared_ptr<Transfer> submit(bool write, int fd, bool direct, std::int64_t offset,
                                   std::span<std::byte> memory);

  bool done(const Transfer& transfer);
  Outcome wait(const Transfer& transfer);
  // Waits no longer than `limit`; true if the transfer is finished.
  bool wait_for(const Transfer& transfer, std::chrono::milliseconds limit);

  // Finishes all transfers, then ends the threads. May be called again.
  virtual void close() = 0;

 protected:
  explicit Engine(Options options) : options_(std::move(options)), queue_(options_.request_bytes) {}

  // Tells the engine's threads that there is work or that they shall stop.
  virtual void wake() = 0;
  void stop();
  void finish(Request& request);  // with mutex_ held
  Attempt attempt(const Request& request) const;

  const Options options_;
  std::mutex mutex_;
  std::condition_variable finished_;
  TransferQueue queue_;
  bool stopping_ = false;
};

// Makes the engine called "io_uring", "libaio" or "threads"; an error if it does not work on this
// machine.
Result<std::unique_ptr<Engine>> make_engine(const std::string& name, Options options);

}  // namespace ssdtune
