package main

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"

	"github.com/berth-dev/berth/proxyd/meter"
	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/daemon"
	"github.com/berth-dev/berth/shared/trust"
)

// controlMux serves health, metrics and, to daemons of the cluster,
//
//	GET /v1/counters?sessionId=ID → meter.Counts
func controlMux(ctx context.Context, secret *trust.Secret, counts *meter.Meter) *http.ServeMux {
	mux := http.NewServeMux()
	daemon.Health(mux, func() error {
		if ctx.Err() != nil {
			return errors.New("proxyd is stopping")
		}
		return nil
	})
	mux.HandleFunc("GET /v1/counters", func(w http.ResponseWriter, r *http.Request) {
		id := r.URL.Query().Get("sessionId")
		switch {
		case !secret.Check(r.Header.Get(trust.Header)):
			answer(w, http.StatusUnauthorized, apierr.New(apierr.Unauthorized, "the cluster secret's proof is missing or wrong"))
		case id == "":
			answer(w, http.StatusBadRequest, apierr.New(apierr.InvalidRequest, "sessionId: name a session"))
		default:
			answer(w, http.StatusOK, counts.Session(id))
		}
	})
	return mux
}

func answer(w http.ResponseWriter, status int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(body)
}
