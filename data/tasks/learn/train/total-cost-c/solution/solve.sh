sqlite3 c.db 'select sum(cost) from t' > answer.txt
