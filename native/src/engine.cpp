#include "ssdtune/engine.h"

#include <cerrno>
#include <system_error>

#include "ssdtune/driver.h"
#include "ssdtune/ring_engine.h"
#include "ssdtune/thread_engine.h"

namespace ssdtune {

std::shared_ptr<Transfer> Engine::submit(bool write, int fd, bool direct, std::int64_t offset,
                                         std::span<std::byte> memory) {
  auto transfer = std::make_shared<Transfer>(write, fd, direct, offset, memory);
  {
    const std::lock_guard lock(mutex_);
    if (stopping_) return nullptr;
    queue_.push(transfer);
  }
  wake();
  return transfer;
}

bool Engine::done(const Transfer& transfer) {
  const std::lock_guard lock(mutex_);
  return transfer.finished;
}

Outcome Engine::wait(const Transfer& transfer) {
  std::unique_lock lock(mutex_);
  finished_.wait(lock, [&] { return transfer.finished; });
  return transfer.outcome;
}

bool Engine::wait_for(const Transfer& transfer, std::chrono::milliseconds limit) {
  std::unique_lock lock(mutex_);
  return finished_.wait_for(lock, limit, [&] { return transfer.finished; });
}

void Engine::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake();
}

void Engine::finish(Request& request) {
  if (queue_.finish(request)) finished_.notify_all();
}

Attempt Engine::attempt(const Request& request) const {
  if (!options_.fault) return {request.length(), 0};
  return options_.fault(request.transfer->write, request.offset(), request.length());
}

Result<std::unique_ptr<Engine>> make_engine(const std::string& name, Options options) try {
  if (name == "threads") return std::make_unique<ThreadEngine>(std::move(options));
  Result<std::unique_ptr<Driver>> driver = Error{EINVAL, "unknown engine " + name};
  if (name == "io_uring") driver = make_uring_driver(options.queue_depth);
  if (name == "libaio") driver = make_aio_driver(options.queue_depth);
  if (auto* error = std::get_if<Error>(&driver)) return std::move(*error);
  return std::make_unique<RingEngine>(std::move(options), std::get<0>(std::move(driver)));
} catch (const std::system_error& error) {  // no thread, or no eventfd for it, to be had
  return Error{error.code().value(), "starting a thread"};
}

}  // namespace ssdtune
