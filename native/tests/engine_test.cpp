// Engines on real files with faults injected: what arrives is right, or the error says what and
// where. Usage: engine_test FOLDER [ENGINE...]

#include "ssdtune/engine.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "ssdtune/driver.h"
#include "ssdtune/ring_engine.h"

namespace {

using ssdtune::Attempt;
using ssdtune::Engine;
using ssdtune::Fault;
using ssdtune::kAlignment;
using ssdtune::Options;
using ssdtune::Outcome;

constexpr std::size_t kRequest = 16 * 1024;

struct Free {
  void operator()(std::byte* memory) const {
    ::operator delete(memory, std::align_val_t{kAlignment});
  }
};

class Memory {
 public:
  explicit Memory(std::size_t size, unsigned seed = 0)
      : size_(size),
        bytes_(static_cast<std::byte*>(::operator new(size, std::align_val_t{kAlignment}))) {
    for (std::size_t i = 0; i < size; ++i) {
      bytes_[i] = static_cast<std::byte>(seed == 0 ? 0 : (i * 2654435761U + seed) >> 11);
    }
  }
  std::span<std::byte> span() const { return {bytes_.get(), size_}; }
  bool operator==(const Memory& other) const {
    return size_ == other.size_ && std::memcmp(bytes_.get(), other.bytes_.get(), size_) == 0;
  }

 private:
  std::size_t size_;
  std::unique_ptr<std::byte[], Free> bytes_;
};

class File {
 public:
  File(const std::string& path, bool direct) : direct_(direct) {
    fd_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC | (direct ? O_DIRECT : 0),
                 0600);
    CHECK(fd_ >= 0);
  }
  File(const File&) = delete;
  ~File() { ::close(fd_); }
  int fd() const { return fd_; }
  bool direct() const { return direct_; }

 private:
  int fd_;
  bool direct_;
};

std::unique_ptr<Engine> make(const std::string& name, Fault fault = {}, unsigned depth = 4) {
  auto engine = ssdtune::make_engine(
      name, Options{.queue_depth = depth, .request_bytes = kRequest, .fault = std::move(fault)});
  if (const auto* error = std::get_if<ssdtune::Error>(&engine)) {
    std::fprintf(stderr, "%s: %s\n", name.c_str(), error->what.c_str());
    std::exit(77);
  }
  return std::get<0>(std::move(engine));
}

Outcome move(Engine& engine, bool write, const File& file, std::int64_t offset,
             const Memory& memory) {
  const auto transfer = engine.submit(write, file.fd(), file.direct(), offset, memory.span());
  CHECK(transfer != nullptr);
  return engine.wait(*transfer);
}

// Fails or shortens the calls whose number (from 0) is in the plan. A shortened call moves `length`
// bytes.
class Plan {
 public:
  struct Step {
    int error = 0;
    std::size_t length = 0;
  };
  explicit Plan(std::map<int, Step> steps) : state_(std::make_shared<State>(std::move(steps))) {}
  Attempt operator()(bool, std::int64_t, std::size_t length) const {
    const std::lock_guard lock(state_->mutex);
    const auto step = state_->steps.find(state_->calls++);
    if (step == state_->steps.end()) return {length, 0};
    if (step->second.error != 0) return {length, step->second.error};
    return {std::min(length, step->second.length), 0};
  }
  int calls() const {
    const std::lock_guard lock(state_->mutex);
    return state_->calls;
  }

 private:
  struct State {
    explicit State(std::map<int, Step> s) : steps(std::move(s)) {}
    std::mutex mutex;
    std::map<int, Step> steps;
    int calls = 0;
  };
  std::shared_ptr<State> state_;
};

void completes_short_interrupted_and_busy(const std::string& name, const std::string& folder) {
  for (const bool direct : {true, false}) {
    const std::size_t size = 9 * kRequest + 3 * kAlignment;
    const File file(folder + "/faults", direct);
    const Memory content(size, 1);
    const Memory back(size);
    std::map<int, Plan::Step> steps;
    for (int i = 0; i < 60; i += 2) {
      if (i % 3 == 0) steps[i] = {.error = EINTR};
      if (i % 3 == 1) steps[i] = {.error = EAGAIN};
      if (i % 3 == 2)
        steps[i] = {.length = direct ? kAlignment : 1000 + static_cast<std::size_t>(i)};
    }
    {
      const auto engine = make(name, Plan(steps));
      const Outcome written = move(*engine, true, file, kAlignment, content);
      CHECK(written.error == 0 && written.moved == size);
    }
    const auto engine = make(name, Plan(steps));
    const Outcome read = move(*engine, false, file, kAlignment, back);
    CHECK(read.error == 0 && read.moved == size);
    CHECK(back == content);
  }
}

void reports_a_failing_request(const std::string& name, const std::string& folder) {
  const std::size_t size = 50 * kRequest;
  const File file(folder + "/eio", true);
  const Memory content(size, 2);
  for (const int number : {EIO, ENOSPC}) {
    const Plan plan({{6, {.error = number}}});
    const auto engine = make(name, plan);
    const Outcome failed = move(*engine, true, file, 0, content);
    CHECK(failed.error == number);
    CHECK(failed.moved % kRequest == 0 && failed.moved <= 7 * kRequest);
    CHECK(plan.calls() < 20);                                    // the rest was not tried
    const Outcome next = move(*engine, true, file, 0, content);  // and the engine goes on
    CHECK(next.error == 0 && next.moved == size);
  }
}

void gives_up_on_busy_for_ever(const std::string& name, const std::string& folder) {
  const File file(folder + "/busy", true);
  const auto engine =
      make(name, [](bool, std::int64_t, std::size_t length) { return Attempt{length, EAGAIN}; });
  const Outcome outcome = move(*engine, false, file, 0, Memory(kAlignment));
  CHECK(outcome.error == EAGAIN && outcome.moved == 0);
}

void finds_the_end_of_the_file(const std::string& name, const std::string& folder) {
  for (const bool direct : {true, false}) {
    for (const std::size_t size :
         {std::size_t{0}, std::size_t{1}, kAlignment + 7, 3 * kRequest, 3 * kRequest + 5}) {
      const File file(folder + "/end", direct);
      CHECK(ftruncate(file.fd(), static_cast<off_t>(size)) == 0);
      const auto engine = make(name);
      const Outcome outcome = move(*engine, false, file, 0, Memory(8 * kRequest));
      CHECK(outcome.error == 0 && outcome.moved == size);
    }
  }
}

void refused_descriptors_do_not_stop_others(const std::string& name, const std::string& folder) {
  const File file(folder + "/bad", true);
  const Memory content(4 * kRequest, 3);
  const auto engine = make(name);
  const auto bad = engine->submit(true, 1 << 20, true, 0, content.span());
  const auto good = engine->submit(true, file.fd(), true, 0, content.span());
  CHECK(engine->wait(*bad).error == EBADF);
  CHECK(engine->wait(*good).error == 0);
}

void takes_turns_between_transfers(const std::string& name, const std::string& folder) {
  // While the first request of a long write is under way, a short read is submitted: from then on
  // they alternate.
  const File file(folder + "/turns", true);
  const Memory content(64 * kRequest, 4);
  CHECK(move(*make(name), true, file, 0, content).error == 0);
  int calls = 0;
  int last_read = 0;
  std::mutex gate;
  const auto engine = make(
      name,
      [&](bool write, std::int64_t, std::size_t length) {
        const std::lock_guard until_both_are_there(gate);
        ++calls;
        if (!write) last_read = calls;
        return Attempt{length, 0};
      },
      1);
  const Memory back(4 * kRequest);
  std::unique_lock closed(gate);
  const auto write = engine->submit(true, file.fd(), true, 0, content.span());
  const auto read = engine->submit(false, file.fd(), true, 0, back.span());
  closed.unlock();
  CHECK(engine->wait(*read).error == 0);
  CHECK(engine->wait(*write).error == 0);
  CHECK(calls == 68 && last_read <= 9);
}

void closing_drains(const std::string& name, const std::string& folder) {
  const File file(folder + "/close", true);
  const Memory content(40 * kRequest, 5);
  const auto engine = make(name);
  const auto transfer = engine->submit(true, file.fd(), true, 0, content.span());
  engine->close();
  CHECK(engine->done(*transfer) && engine->wait(*transfer).moved == 40 * kRequest);
  CHECK(engine->submit(true, file.fd(), true, 0, content.span()) == nullptr);
  engine->close();
}

void many_threads_share_an_engine(const std::string& name, const std::string& folder) {
  const auto engine = make(name, {}, 7);
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      const File file(folder + "/many" + std::to_string(t), t % 2 == 0);
      const Memory content(5 * kRequest + kAlignment, t + 1);
      for (int round = 0; round < 10; ++round) {
        Memory back(5 * kRequest + kAlignment);
        CHECK(move(*engine, true, file, round * 4096L, content).error == 0);
        CHECK(move(*engine, false, file, round * 4096L, back).error == 0);
        CHECK(back == content);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// A driver that holds everything back until nothing more comes, then completes it in reverse order,
// with short counts. It also refuses to start anything at every other flush.
class LateDriver final : public ssdtune::Driver {
 public:
  int set_event(int event_fd) noexcept override {
    event_fd_ = event_fd;
    return 0;
  }
  void push(const ssdtune::Io& io) noexcept override { held_.push_back(io); }
  bool flush() noexcept override {
    const std::uint64_t one = 1;
    if (!held_.empty()) CHECK(::write(event_fd_, &one, sizeof one) == sizeof one);
    return (++flushes_ % 2) == 0;
  }
  std::size_t reap(std::span<ssdtune::Completion> completions) noexcept override {
    if (held_.empty() || held_.size() < most_) {
      most_ = held_.size();
      return 0;  // wait until no more arrive
    }
    most_ = 0;
    const ssdtune::Io io = held_.back();
    held_.pop_back();
    const std::size_t length = io.length > 2 * kAlignment ? io.length - kAlignment : io.length;
    const ssize_t moved = io.write ? pwrite(io.fd, io.memory, length, io.offset)
                                   : pread(io.fd, io.memory, length, io.offset);
    completions[0] = {io.tag, moved < 0 ? -errno : moved};
    return 1;
  }

 private:
  int event_fd_ = -1;
  int flushes_ = 0;
  std::size_t most_ = 0;
  std::vector<ssdtune::Io> held_;
};

void late_and_reordered_completions(const std::string& folder) {
  const File file(folder + "/late", true);
  const std::size_t size = 20 * kRequest;
  const Memory content(size, 6);
  const Memory back(size);
  const Memory other(size);
  ssdtune::RingEngine engine(Options{.queue_depth = 5, .request_bytes = kRequest, .fault = {}},
                             std::make_unique<LateDriver>());
  CHECK(move(engine, true, file, 0, content).moved == size);
  const auto first = engine.submit(false, file.fd(), true, 0, back.span());
  const auto second = engine.submit(false, file.fd(), true, 0, other.span());
  CHECK(engine.wait(*second).moved == size && engine.wait(*first).moved == size);
  CHECK(back == content && other == content);
  const auto past = engine.submit(false, file.fd(), true, 10 * kRequest, back.span());
  CHECK(engine.wait(*past).moved == 10 * kRequest && engine.wait(*past).error == 0);
}

}  // namespace

int main(int argc, char** argv) {
  CHECK(argc >= 2);
  const std::string folder = argv[1];
  std::vector<std::string> names(argv + 2, argv + argc);
  if (names.empty()) names = {"io_uring", "libaio", "threads"};
  for (const std::string& name : names) {
    completes_short_interrupted_and_busy(name, folder);
    reports_a_failing_request(name, folder);
    gives_up_on_busy_for_ever(name, folder);
    finds_the_end_of_the_file(name, folder);
    refused_descriptors_do_not_stop_others(name, folder);
    takes_turns_between_transfers(name, folder);
    closing_drains(name, folder);
    many_threads_share_an_engine(name, folder);
    std::printf("%s ok\n", name.c_str());
  }
  late_and_reordered_completions(folder);
  std::puts("late ok");
}
