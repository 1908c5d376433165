// Package apierr is Berth's one error type: a closed set of codes, each with
// its HTTP status, and the same error rebuilt on the far side of every wire.
//
// Inside a daemon wrap with fmt.Errorf("op: %w", err) once a layer; a handler
// turns whatever arrives into an *Error with From. A caller tests codes with
// Is, never text.
package apierr

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"time"
)

// Code names one kind of failure. The set is closed: statuses lists all.
type Code string

// The codes of the public API (spec "Errors", decisions "API manners").
const (
	InvalidRequest       Code = "invalid_request"
	Unauthorized         Code = "unauthorized"
	PlanLimit            Code = "plan_limit"
	NotFound             Code = "not_found"
	MethodNotAllowed     Code = "method_not_allowed"
	WaitTimeout          Code = "wait_timeout"
	SessionNotRunning    Code = "session_not_running"
	OperationInProgress  Code = "operation_in_progress"
	TooLarge             Code = "too_large"
	UnsupportedMediaType Code = "unsupported_media_type"
	RangeNotSatisfiable  Code = "range_not_satisfiable"
	ConcurrencyLimit     Code = "concurrency_limit"
	SpendLimit           Code = "spend_limit"
	Canceled             Code = "canceled"
	Internal             Code = "internal"
	NoCapacity           Code = "no_capacity"
	Unavailable          Code = "unavailable"
	ProxyUnavailable     Code = "proxy_unavailable"
	Timeout              Code = "timeout"
)

var statuses = map[Code]int{
	InvalidRequest:       http.StatusBadRequest,
	Unauthorized:         http.StatusUnauthorized,
	PlanLimit:            http.StatusForbidden,
	NotFound:             http.StatusNotFound,
	MethodNotAllowed:     http.StatusMethodNotAllowed,
	WaitTimeout:          http.StatusRequestTimeout,
	SessionNotRunning:    http.StatusConflict,
	OperationInProgress:  http.StatusConflict,
	TooLarge:             http.StatusRequestEntityTooLarge,
	UnsupportedMediaType: http.StatusUnsupportedMediaType,
	RangeNotSatisfiable:  http.StatusRequestedRangeNotSatisfiable,
	ConcurrencyLimit:     http.StatusTooManyRequests,
	SpendLimit:           http.StatusPaymentRequired,
	Canceled:             499, // the client left; nobody reads it, logs do
	Internal:             http.StatusInternalServerError,
	NoCapacity:           http.StatusServiceUnavailable,
	Unavailable:          http.StatusServiceUnavailable,
	ProxyUnavailable:     http.StatusServiceUnavailable,
	Timeout:              http.StatusGatewayTimeout,
}

// Codes returns every code of the closed set, in no order.
func Codes() []Code {
	all := make([]Code, 0, len(statuses))
	for c := range statuses {
		all = append(all, c)
	}
	return all
}

// Error is a failure that may be shown to a client. Message is a sentence for
// people that names the field and what would be right; it holds no secret.
type Error struct {
	Code       Code
	Message    string
	RetryAfter time.Duration // 0: none; sent as the retry-after header in whole seconds
	cause      error         // for logs only, never sent
	status     int           // instead of the code's own; 0: that
}

// New makes an error of a code.
func New(code Code, format string, args ...any) *Error {
	return &Error{Code: code, Message: fmt.Sprintf(format, args...)}
}

// Wrap makes an error of a code that keeps cause for logs and errors.Is.
func Wrap(cause error, code Code, format string, args ...any) *Error {
	e := New(code, format, args...)
	e.cause = cause
	return e
}

// After returns a copy of e that asks the client to wait d before a retry.
func (e *Error) After(d time.Duration) *Error {
	c := *e
	c.RetryAfter = d
	return &c
}

// PaymentRequired returns a copy of e with status 402: plan_limit is 403 for a
// limit and 402 for what the plan does not include (spec "Errors").
func (e *Error) PaymentRequired() *Error {
	c := *e
	c.status = http.StatusPaymentRequired
	return &c
}

// Error is for logs: code, message and cause.
func (e *Error) Error() string {
	if e.cause != nil {
		return fmt.Sprintf("%s: %s: %v", e.Code, e.Message, e.cause)
	}
	return fmt.Sprintf("%s: %s", e.Code, e.Message)
}

// Unwrap gives the cause.
func (e *Error) Unwrap() error { return e.cause }

// Status is the HTTP status of the error.
func (e *Error) Status() int {
	if e.status != 0 {
		return e.status
	}
	if s, ok := statuses[e.Code]; ok {
		return s
	}
	return http.StatusInternalServerError
}

// From finds the *Error in err's chain; anything else becomes Internal with a
// message that gives nothing away.
func From(err error) *Error {
	var e *Error
	if errors.As(err, &e) {
		return e
	}
	return Wrap(err, Internal, "something went wrong on our side; the request id helps to find it")
}

// Is says whether err carries the code.
func Is(err error, code Code) bool {
	var e *Error
	return errors.As(err, &e) && e.Code == code
}

type envelope struct {
	Error struct {
		Code    Code   `json:"code"`
		Message string `json:"message"`
	} `json:"error"`
}

// MarshalJSON gives the spec's envelope {"error":{"code","message"}}.
func (e *Error) MarshalJSON() ([]byte, error) {
	var v envelope
	v.Error.Code, v.Error.Message = e.Code, e.Message
	return json.Marshal(v)
}

// Parse rebuilds the error of a response with the given status and body. A
// body that is no envelope, or a code outside the set, becomes Internal.
func Parse(status int, body []byte) *Error {
	var v envelope
	if err := json.Unmarshal(body, &v); err == nil {
		if _, known := statuses[v.Error.Code]; known {
			e := New(v.Error.Code, "%s", v.Error.Message)
			if status == http.StatusPaymentRequired {
				return e.PaymentRequired()
			}
			return e
		}
	}
	return New(Internal, "unexpected answer with status %d", status)
}
