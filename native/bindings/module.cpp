// The Python module ssdtune._native. It only converts: engines and kernels are in src/.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "ssdtune/adam.h"
#include "ssdtune/codes.h"
#include "ssdtune/engine.h"

namespace py = pybind11;

namespace {

// A view of a Python buffer that keeps it alive; made and destroyed with the interpreter lock held.
class View {
 public:
  View(const py::object& object, bool writable) {
    const int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) throw py::error_already_set();
  }
  View(const View&) = delete;
  View& operator=(const View&) = delete;
  ~View() { PyBuffer_Release(&view_); }

  std::size_t num_bytes() const { return static_cast<std::size_t>(view_.len); }
  std::byte* data() const { return static_cast<std::byte*>(view_.buf); }

  // The elements, checked against the wanted format ("f", "h" or "H") and length.
  template <typename T>
  T* elements(const char* name, const char* format, std::size_t size) const {
    if (view_.format == nullptr || std::strcmp(view_.format, format) != 0 ||
        num_bytes() != size * sizeof(T)) {
      throw py::value_error(std::string(name) + ": wrong type or length");
    }
    if (reinterpret_cast<std::uintptr_t>(view_.buf) % alignof(T) != 0) {
      throw py::value_error(std::string(name) +
                            ": address is not a multiple of the element's size");
    }
    return reinterpret_cast<T*>(view_.buf);
  }

 private:
  Py_buffer view_{};
};

[[noreturn]] void raise_os_error(const ssdtune::Error& error) {
  PyErr_SetObject(PyExc_OSError, py::make_tuple(error.number, error.what).ptr());
  throw py::error_already_set();
}

// A transfer with the Python buffer that it uses. The buffer is released when the transfer is
// waited for, or collected; never by an engine's thread.
class PyTransfer {
 public:
  PyTransfer(std::shared_ptr<ssdtune::Engine> engine, std::shared_ptr<ssdtune::Transfer> transfer,
             std::unique_ptr<View> view)
      : engine_(std::move(engine)), transfer_(std::move(transfer)), view_(std::move(view)) {}
  PyTransfer(const PyTransfer&) = delete;
  PyTransfer& operator=(const PyTransfer&) = delete;
  ~PyTransfer() {
    if (view_ == nullptr) return;
    const py::gil_scoped_release release;
    engine_->wait(*transfer_);
  }

  bool done() const { return engine_->done(*transfer_); }

  std::pair<int, std::size_t> wait() {
    while (!wait_a_moment()) {
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    }
    view_.reset();
    const ssdtune::Outcome outcome = engine_->wait(*transfer_);
    return {outcome.error, outcome.moved};
  }

 private:
  // Comes back now and then, so that Ctrl-C works even if a drive hangs.
  bool wait_a_moment() const {
    const py::gil_scoped_release release;
    return engine_->wait_for(*transfer_, std::chrono::milliseconds(200));
  }

  std::shared_ptr<ssdtune::Engine> engine_;
  std::shared_ptr<ssdtune::Transfer> transfer_;
  std::unique_ptr<View> view_;
};

class PyEngine {
 public:
  PyEngine(const std::string& name, unsigned queue_depth, std::size_t request_bytes) {
    ssdtune::Options options;
    options.queue_depth = queue_depth;
    options.request_bytes = request_bytes;
    auto engine = ssdtune::make_engine(name, std::move(options));
    if (const auto* error = std::get_if<ssdtune::Error>(&engine)) raise_os_error(*error);
    engine_ = std::get<0>(std::move(engine));
  }

  std::unique_ptr<PyTransfer> submit(bool write, int fd, bool direct, std::int64_t offset,
                                     const py::object& buffer) {
    auto view = std::make_unique<View>(buffer, !write);
    if (view->num_bytes() == 0) throw py::value_error("a transfer has at least one byte");
    std::shared_ptr<ssdtune::Transfer> transfer;
    {
      const py::gil_scoped_release release;
      transfer = engine_->submit(write, fd, direct, offset, {view->data(), view->num_bytes()});
    }
    if (transfer == nullptr) throw py::value_error("the engine is closed");
    return std::make_unique<PyTransfer>(engine_, std::move(transfer), std::move(view));
  }

  void close() {
    const py::gil_scoped_release release;
    engine_->close();
  }

 private:
  std::shared_ptr<ssdtune::Engine> engine_;
};

bool adamw(const py::object& weights, const py::object& low, const py::object& exp_avg,
           const py::object& exp_avg_sq, const py::object& grad, std::size_t size,
           const std::vector<float>& s, unsigned threads, const std::string& level,
           const py::object& exp_avg_scale, const py::object& exp_avg_sq_scale,
           const std::vector<std::uint32_t>& rounding) {
  if (s.size() != 8) throw py::value_error("AdamW takes eight scalars");
  std::vector<std::unique_ptr<View>> views;
  const auto array = [&views](const char* name, const char* format, const py::object& object,
                              std::size_t count, auto*& elements) {
    using Element = std::remove_reference_t<decltype(*elements)>;
    views.push_back(std::make_unique<View>(object, !std::is_const_v<Element>));
    elements = views.back()->elements<Element>(name, format, count);
  };
  ssdtune::AdamArrays arrays;
  if (!low.is_none() || !rounding.empty()) {
    array("weights", "H", weights, size, arrays.high);
  } else {
    array("weights", "f", weights, size, arrays.master);
  }
  if (!low.is_none()) array("low", "h", low, size, arrays.low);
  if (exp_avg_scale.is_none()) {
    array("exp_avg", "f", exp_avg, size, arrays.exp_avg);
    array("exp_avg_sq", "f", exp_avg_sq, size, arrays.exp_avg_sq);
  } else {
    const std::size_t blocks = (size + ssdtune::kCodeBlock - 1) / ssdtune::kCodeBlock;
    array("exp_avg", "B", exp_avg, size, arrays.exp_avg_code);
    array("exp_avg_sq", "B", exp_avg_sq, size, arrays.exp_avg_sq_code);
    array("exp_avg_scale", "f", exp_avg_scale, blocks, arrays.exp_avg_scale);
    array("exp_avg_sq_scale", "f", exp_avg_sq_scale, blocks, arrays.exp_avg_sq_scale);
  }
  array("grad", "f", grad, size, arrays.grad);
  arrays.size = size;
  if (!rounding.empty()) {
    if (rounding.size() != 3) throw py::value_error("rounding takes two keys and an index");
    arrays.rounding = {{rounding[0], rounding[1]}, rounding[2]};
  }
  const ssdtune::AdamScalars scalars{s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7]};
  const py::gil_scoped_release release;
  return ssdtune::adamw(arrays, scalars, threads, level);
}

double sum_of_squares(const py::object& values, std::size_t size, unsigned threads,
                      const std::string& level) {
  const View view(values, false);
  const float* elements = view.elements<float>("values", "f", size);
  const py::gil_scoped_release release;
  return ssdtune::sum_of_squares(elements, size, threads, level);
}

}  // namespace

PYBIND11_MODULE(_native, module) {
  module.doc() =
      "Native I/O engines and optimizer kernels; see ssdtune.io.native and ssdtune.optim.adamw.";

  py::class_<PyTransfer>(module, "Transfer")
      .def("done", &PyTransfer::done)
      .def("wait", &PyTransfer::wait);
  py::class_<PyEngine>(module, "Engine")
      .def(py::init<const std::string&, unsigned, std::size_t>(), py::arg("name"),
           py::arg("queue_depth"), py::arg("request_bytes"))
      .def("submit", &PyEngine::submit, py::arg("write"), py::arg("descriptor"), py::arg("direct"),
           py::arg("offset"), py::arg("buffer"))
      .def("close", &PyEngine::close);

  module.def("simd_levels", &ssdtune::simd_levels);
  module.def("simd_name", [] { return ssdtune::simd_levels().front(); });
  module.def("adamw", &adamw, py::arg("weights"), py::arg("low"), py::arg("exp_avg"),
             py::arg("exp_avg_sq"), py::arg("grad"), py::arg("size"), py::arg("scalars"),
             py::arg("threads"), py::arg("level"), py::arg("exp_avg_scale") = py::none(),
             py::arg("exp_avg_sq_scale") = py::none(),
             py::arg("rounding") = std::vector<std::uint32_t>());
  module.def("sum_of_squares", &sum_of_squares, py::arg("values"), py::arg("size"),
             py::arg("threads"), py::arg("level"));
}
