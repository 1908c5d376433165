package refusals

import (
	"encoding/json"
	"net/http"
	"time"

	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/proxylink"
)

// writeTimeout is how long a host may take to read what is written to it.
const writeTimeout = 10 * time.Second

// ServeHTTP streams a host's refusals (GET /v1/refusals?host=NAME) as lines of
// JSON, and an empty line at least each second. A second reader of a host ends
// the first: after a restart the new one counts.
func (f *Feed) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	host := r.URL.Query().Get("host")
	if host == "" {
		fail(w, http.StatusBadRequest, apierr.New(apierr.InvalidRequest, "host: name one"))
		return
	}
	me, ok := f.read(host)
	if !ok {
		fail(w, http.StatusServiceUnavailable, apierr.New(apierr.Internal, "too many hosts have refusals waiting"))
		return
	}
	w.Header().Set("Content-Type", "application/x-ndjson")
	me.close(me.stream(w, r))
}

// stream writes until the reader leaves or is replaced, then what is left, and
// gives what it could not write.
func (r *reader) stream(w http.ResponseWriter, req *http.Request) (unsent []proxylink.Refused) {
	control := http.NewResponseController(w)
	beat := time.NewTicker(proxylink.Beat)
	defer beat.Stop()
	for last := false; ; {
		list := r.next()
		_ = control.SetWriteDeadline(time.Now().Add(writeTimeout))
		if err := write(w, control, list); err != nil || last {
			if err == nil {
				list = nil
			}
			return list
		}
		select {
		case <-req.Context().Done():
			last = true
		case <-r.taken:
			return nil
		case <-r.q.wake:
		case <-beat.C:
		}
	}
}

// write writes a batch, or an empty line.
func write(w http.ResponseWriter, control *http.ResponseController, list []proxylink.Refused) error {
	body := []byte{}
	for _, x := range list {
		line, err := json.Marshal(x)
		if err != nil {
			return err
		}
		body = append(append(body, line...), '\n')
	}
	if len(list) == 0 {
		body = []byte{'\n'}
	}
	if _, err := w.Write(body); err != nil {
		return err
	}
	return control.Flush()
}

func fail(w http.ResponseWriter, status int, e *apierr.Error) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(e)
}
