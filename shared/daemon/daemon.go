// Package daemon is what the three daemons and the command share: flags with
// environment and help, logs, signals, health and metrics.
package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/VictoriaMetrics/metrics"
	"github.com/alecthomas/kong"
)

// Parse fills cfg, a pointer to a struct with kong tags, from the command line
// and the environment; --help and bad flags end the process as users expect.
// In defaults ${home} is $BERTH_HOME and ${listen} is $BERTH_LISTEN.
func Parse(cfg any, name, description string) *kong.Context {
	return kong.Parse(cfg, kong.Name(name), kong.Description(description), kong.UsageOnError(),
		kong.Vars{"home": setting("BERTH_HOME", "/var/lib/berth"), "listen": setting("BERTH_LISTEN", "127.0.0.1:8080")},
		kong.ValueFormatter(explain), kong.ConfigureHelp(kong.HelpOptions{Compact: true, WrapUpperBound: 100}))
}

func setting(name, otherwise string) string {
	if v := os.Getenv(name); v != "" {
		return v
	}
	return otherwise
}

// explain is a flag's help with its default and its variable.
func explain(v *kong.Value) string {
	text := v.Help
	if v.HasDefault && v.Default != "" && v.Tag.PlaceHolder != "" { // else the flag's form shows it
		text += " Default: " + v.Default + "."
	}
	if len(v.Tag.Envs) > 0 {
		text += " ($" + strings.Join(v.Tag.Envs, ", $") + ")"
	}
	return text
}

// LogConfig is embedded in every daemon's configuration.
type LogConfig struct {
	LogLevel string `help:"Least level logged: debug, info, warn or error." default:"info" enum:"debug,info,warn,error" env:"BERTH_LOG_LEVEL"`
}

// Logger makes the daemon's logger, text lines on stderr, and sets it as default.
func (c LogConfig) Logger(daemon string) *slog.Logger {
	var level slog.Level
	_ = level.UnmarshalText([]byte(c.LogLevel)) // the enum allows only valid ones
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level})).With("daemon", daemon)
	slog.SetDefault(log)
	return log
}

// ErrSignal is the cause of the context that Main gives when a signal ended it.
var ErrSignal = errors.New("asked to stop by a signal")

// Main runs run until it returns or SIGINT or SIGTERM cancels its context, and
// exits with its verdict. A second signal ends the process at once.
func Main(name string, run func(ctx context.Context) error) {
	noCore(name)
	ctx, cancel := context.WithCancelCause(context.Background())
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	go func() {
		<-signals
		cancel(ErrSignal)
		<-signals
		os.Exit(130)
	}()
	if err := failure(ctx, run(ctx)); err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", name, err)
		os.Exit(1)
	}
}

// failure is what is left of err beside the news that a signal came: what went
// wrong on the way down must show.
func failure(ctx context.Context, err error) error {
	if err == nil || !errors.Is(context.Cause(ctx), ErrSignal) {
		return err
	}
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		var left []error
		for _, e := range joined.Unwrap() {
			left = append(left, failure(ctx, e))
		}
		return errors.Join(left...)
	}
	if errors.Is(err, ErrSignal) || errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

// Counter gives the process-wide counter of a name in Prometheus form, labels
// included: `berth_x_total{kind="y"}`.
func Counter(name string) *metrics.Counter { return metrics.GetOrCreateCounter(name) }

// Gauge registers a gauge whose value read gives at each scrape.
func Gauge(name string, read func() float64) { metrics.GetOrCreateGauge(name, read) }

// Histogram gives the process-wide histogram of a name.
func Histogram(name string) *metrics.Histogram { return metrics.GetOrCreateHistogram(name) }

// WriteMetrics writes all metrics of the process in Prometheus text form.
func WriteMetrics(w io.Writer) { metrics.WritePrometheus(w, true) }

// Health adds /healthz, /readyz and /metrics to mux. ready returns nil or says
// what is missing.
func Health(mux *http.ServeMux, ready func() error) {
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if err := ready(); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ready")
	})
	mux.HandleFunc("GET /metrics", func(w http.ResponseWriter, _ *http.Request) { WriteMetrics(w) })
}
