package cdp

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"

	"github.com/berth-dev/berth/hostd/agent/reply"
	"github.com/berth-dev/berth/shared/agentlink"
	"github.com/berth-dev/berth/shared/apierr"
)

// ServeVersion serves /json/version: Chrome's own answer with the session's
// connectUrl (from agentlink.ConnectURLHeader) as webSocketDebuggerUrl.
func (b *Broker) ServeVersion(w http.ResponseWriter, r *http.Request) {
	var v map[string]any
	if err := b.ask(r, "/json/version", &v); err != nil {
		reply.Error(w, r, err)
		return
	}
	retarget(v, r.Header.Get(agentlink.ConnectURLHeader))
	reply.JSON(w, http.StatusOK, v)
}

// ServeList serves /json/list likewise; each entry gets the connectUrl.
func (b *Broker) ServeList(w http.ResponseWriter, r *http.Request) {
	list := []map[string]any{}
	e, err := b.endpoint(r.Context())
	if err == nil && e.Page != nil {
		err = e.Page(r.Context())
	}
	if err == nil {
		err = b.ask(r, "/json/list", &list)
	}
	if err != nil {
		reply.Error(w, r, err)
		return
	}
	for _, entry := range list {
		retarget(entry, r.Header.Get(agentlink.ConnectURLHeader))
	}
	reply.JSON(w, http.StatusOK, list)
}

// retarget takes the machine's inside addresses out of an entry.
func retarget(entry map[string]any, connectURL string) {
	delete(entry, "devtoolsFrontendUrl")
	delete(entry, "devtoolsFrontendUrlCompat")
	delete(entry, "webSocketDebuggerUrl")
	if connectURL != "" {
		entry["webSocketDebuggerUrl"] = connectURL
	}
}

func (b *Broker) ask(r *http.Request, path string, out any) error {
	endpoint, err := b.endpoint(r.Context())
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(r.Context(), http.MethodGet, "http://"+endpoint.Addr+path, nil)
	if err != nil {
		return fmt.Errorf("ask chrome: %w", err)
	}
	res, err := b.client.Do(req)
	if err != nil {
		return apierr.Wrap(err, apierr.Unavailable, "Chrome does not answer; try again in a moment")
	}
	defer res.Body.Close()
	if err := json.NewDecoder(io.LimitReader(res.Body, 16<<20)).Decode(out); err != nil {
		return fmt.Errorf("ask chrome: %w", err)
	}
	return nil
}
